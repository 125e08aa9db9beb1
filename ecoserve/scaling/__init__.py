"""What autoscaling measures: queries, where they are answered, and the signals made of them."""

"""The stream relay: continues streams whose worker dies on another worker. Off by default."""

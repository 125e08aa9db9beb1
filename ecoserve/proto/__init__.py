"""The protocol between workers, scheduler and controller, and its generated stubs (make proto)."""

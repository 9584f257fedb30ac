"""What the server remembers of what it did."""

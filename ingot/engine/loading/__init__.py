"""Loading: from settings and model folders to running engines."""

"""Heads that guess the token behind the next one: finding them in checkpoints, loading them, and trying them out."""

"""Other projects' clients that `ingot launch` starts, and how each is configured for a server.

A client is a section of `clients`, and one name in `AGENTS` at its end.
"""

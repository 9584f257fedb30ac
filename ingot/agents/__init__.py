"""Other projects' clients that `ingot launch` starts: how each is configured for a server, in the words it reads.

A client is a section of `clients`, and one name in `AGENTS` at its end.
"""

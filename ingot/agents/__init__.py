"""Other projects' clients that `ingot launch` starts: what each has to be told of a server, in the words it reads.

A client is one file here and one line in `registry`.
"""

"""The HTTP side of a server with several models: which one a request names, and the endpoints that tell of all."""

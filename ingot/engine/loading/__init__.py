"""Several models in one server: which are loaded, who uses them, and which make room for which."""

"""Keys and values in fewer bits: what kept records are put into when memory is short, and what they are read back from.
See docs/codecs.md."""

"""Wire formats of model families: one table each."""

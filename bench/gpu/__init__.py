"""`python -m bench.gpu`: is ingot right on this GPU, and as fast as it is meant to be."""

"""`python -m bench.gpu`: is ingot correct on this GPU, and does it reach its goals?"""

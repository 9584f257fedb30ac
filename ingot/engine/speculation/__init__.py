"""Speculative decoding: proposers name draft tokens, a forward pass samples a token at each of their positions, and the
draft tokens that were sampled are accepted.

What is emitted is always the model's own sample, so that texts are the same with and without speculation.
"""

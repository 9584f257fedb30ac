"""Speculative decoding: proposers name draft tokens, a forward pass draws a token at each of their places, and the
drafts that were drawn are accepted.

What is emitted is always the model's own draw, so that texts are the same with and without.
"""

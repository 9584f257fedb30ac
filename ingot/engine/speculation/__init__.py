"""Guessing ahead: proposers name tokens that may come next, a forward pass draws what does come at each of their
places, and what was guessed rightly is taken over.

What is emitted is always the model's own draw, so that texts are the same with and without.
"""

"""A small cross-encoder: questions, passages that answer them or do not, and the network that tells them apart."""

"""Pooling models, which make a vector or a score of a text: BERT-type encoders of our own, and decoders through the
adapter."""

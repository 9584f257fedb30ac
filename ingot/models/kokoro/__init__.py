"""Kokoro, a model that speaks: phonemes and a voice in, samples of sound out."""

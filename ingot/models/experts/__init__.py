"""Mixtures larger than memory: experts are read from the model's own files, and those in use stay in slots."""

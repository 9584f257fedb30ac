"""Draft heads: MTP, EAGLE-3, assistants and block drafters. Finding them in checkpoints, loading them, trying them."""

"""Draft heads (MTP and EAGLE-3): finding them in checkpoints, loading them, and trying them out."""

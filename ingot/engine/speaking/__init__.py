"""Speech: what is written is spoken, piece by piece, between two steps of answers."""

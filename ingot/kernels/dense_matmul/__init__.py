"""Products of few rows with weights of 16 bits: weights are read once, and a row's bits are its own."""

"""Products with packed weights for few rows: weights are read once, as they lie in memory."""

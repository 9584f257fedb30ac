"""What carries kernels to a GPU, or to what emulates one: their texts in each language, and what launches them."""

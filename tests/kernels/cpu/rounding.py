"""How far products with packed weights may be off: activations are rounded to 8 bits, in blocks with a scale each."""

from __future__ import annotations

import numpy as np

BLOCK = 32
WIDE_BOUND = 2**-7
"""Of the products' magnitudes, where many rows are multiplied as bfloat16."""


def half_steps(x: np.ndarray) -> np.ndarray:
    """For each number of x [..., columns], the most that rounding may change it by."""
    blocks = np.abs(x).reshape(*x.shape[:-1], -1, BLOCK)
    largest = blocks.max(axis=-1, keepdims=True)
    return np.broadcast_to(largest / 127 / 2, blocks.shape).reshape(x.shape)

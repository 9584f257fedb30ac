"""Running an encoder to its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingot.models.pooling_models.encoder import PoolingEncoder


def finished(
    encoder: PoolingEncoder, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    work = encoder.run(tokens, types or [()] * len(tokens))
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return np.array(ended.value)

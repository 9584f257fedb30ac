"""A rank that only adds over MLX's ring; rank 0 prints how long that took. Started by `sums`."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import mlx.core as mx

WARM = 5  # sums that are not counted


def add(size: int, sums: int) -> None:
    """Prints the median in milliseconds."""
    mx.set_default_device(mx.Device(mx.cpu))
    group: Any = mx.distributed.init(strict=True, backend="ring")
    mine = mx.ones(size)
    spent = []
    for _ in range(WARM + sums):
        began = time.perf_counter()
        mx.eval(mx.distributed.all_sum(mine, group=group))
        spent.append(1000 * (time.perf_counter() - began))
    if group.rank() == 0:
        print(statistics.median(spent[WARM:]), flush=True)


if __name__ == "__main__":
    add(int(sys.argv[1]), int(sys.argv[2]))

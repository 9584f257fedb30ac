"""What the disk tier did so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DiskCounts:
    """Each number is changed by one thread; any may read them."""

    spills: int = 0  # records that were written
    spilled_bytes: int = 0
    spill_s: float = 0.0
    dropped: int = 0  # records that were not, as too much waited to be written
    spill_failures: int = 0  # records that could not be written
    hits: int = 0  # prompts that took something over from disk
    misses: int = 0  # prompts that found nothing there
    promotions: int = 0  # records that were read back
    promoted_bytes: int = 0
    promotion_s: float = 0.0
    promotion_failures: int = 0  # records that could not be read, or were not what was written

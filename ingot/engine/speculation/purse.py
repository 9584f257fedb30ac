"""What may be lost by guessing: so much, and no more.

Whatever is believed of costs and chances, belief may be wrong. So what guessing rounds gave and took is held against
plain rounds, and what they lost is paid from a purse, which a small share of all time fills, and gains fill, too. Who
cannot pay for the worst that may come of a guess does not guess.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 1.5
"""What there is to begin with, in plain rounds."""
MOST: Final = 3.0
"""However much was won, no more may be lost again."""
SHARE: Final = 0.014
"""Of all time, so much may be lost."""
DEBT: Final = 1.0
"""What is owed at most: one long guess that was all wrong, in a round that was slow by chance, is not to forbid for a
hundred rounds what paid before. What may be lost at once is bounded anyway, by what there is to pay it from."""


class Purse:
    """In plain rounds of as many rows."""

    def __init__(self) -> None:
        self.left = FIRST

    def fill(self, rounds: int = 1) -> None:
        """Time goes by."""
        self.left = min(self.left + rounds * SHARE, MOST)

    def settle(self, gained: float) -> None:
        """A round gave so many plain rounds' tokens more than plain ones would have in its time, or fewer."""
        self.left = max(min(self.left + gained, MOST), -DEBT)

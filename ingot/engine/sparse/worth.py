"""Whether scoring a prompt and computing a part of it takes less than computing all of it, as far as is measured."""

from __future__ import annotations

from ingot.engine.step_costs import LeastCost, StepCosts

TRY_AGAIN = 8
"""Of so many prompts in a row that would not have paid, the last is scored: what is measured may change."""


class Worth:
    def __init__(self, costs: StepCosts) -> None:
        """`costs` are those of whoever computes prompts."""
        self._costs = costs
        self._scoring_ms = LeastCost()  # by tokens that were read
        self._declined = 0  # prompts in a row that would not have paid

    def observe(self, read: int, seconds: float) -> None:
        """So many tokens were read to score a prompt, and so long it took."""
        self._scoring_ms.observe(read, 1000 * seconds)

    def pays(self, new: int, kept: int, unread: int) -> bool:
        """Whether to score a prompt of which so many tokens are new, and so many of them would be kept, when the scorer
        has to read so many."""
        if kept >= new:
            return False
        whole = self._costs.prefill_ms(new)
        if not whole or self._scoring_ms.cost(unread) + self._costs.prefill_ms(kept) < whole:
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % TRY_AGAIN == 0

"""A smaller model beside the target, with rows, pages and kept prefixes of its own. Who guesses ahead and who scores
prompts share one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many

from ingot.cache.footprint import Footprint
from ingot.engine.forward_pass import Passes
from ingot.engine.memory_budget import Budget
from ingot.engine.prefix_cache import Reuse
from ingot.engine.room import Room
from ingot.engine.sequence import Sequence
from ingot.engine.step_costs import StepCosts
from ingot.models.adapter import Adapter

CATCH_UP = 512
"""Tokens that are read in one step, of all sequences together."""
AT_ONCE = 2048
"""Tokens of one prompt that are read in one pass, at most, where nobody waits for its end."""
Reserved = tuple[Sequence, int]
"""A sequence, as the draft has it, and the tokens that there is to be room for."""


class DraftModel:
    def __init__(self, adapter: Adapter, budget: Budget, *, cache_bytes: int = 0) -> None:
        """Kept prefixes may take so many bytes of what the budget has for states."""
        self.adapter, self.budget = adapter, budget
        self.rows = adapter.new_rows(budget.states)
        costs = StepCosts()
        costs.observe_prefill(1, 1.0)  # what is kept is weighed against nothing but itself
        self.reuse = Reuse(self.rows, budget, costs, cache_bytes)
        self.passes = Passes(adapter, budget)
        self._room = Room(budget, self.reuse.known_pages)
        self._holders: list[tuple[Callable[[], Many[Reserved]], Callable[[], None]]] = []

    def add_holder(self, reserved: Callable[[], Many[Reserved]], give_way: Callable[[], None]) -> None:
        """Somebody whose sequences have rows: what is `reserved` for them, and how he lets go of them."""
        self._holders.append((reserved, give_way))

    def fits(self, reserved: Many[Reserved], among: Collection[Sequence] = ()) -> bool:
        """Whether there is room for these beside all that hold rows, but for those that they are chosen `among`."""
        held = [each for each in self._reserved() if each[0] not in among]
        return self._room.fits([*held, *reserved])

    def clear_the_way(self) -> None:
        """Let everybody give his rows back. What they read is kept, as far as that goes."""
        for _, give_way in self._holders:
            give_way()

    def make_way(self) -> None:
        """Hold no more kept prefixes than rows leave room for."""
        self.reuse.make_way(self._room.needed(self._reserved()))

    def _reserved(self) -> list[Reserved]:
        return [each for reserved, _ in self._holders for each in reserved()]

    def check(self) -> None:
        self.rows.check()
        self.reuse.check()
        assert self.rows.count == len(self._reserved()), "a row of the draft is nobody's"


def reading(sequence: Sequence) -> Sequence:
    """A sequence as it is for the draft, which reads all of its prompt: row, and what is computed, are its own."""
    prompt = sequence.whole_prompt
    own = Sequence(sequence.request, sequence.index, sequence.ticket, prompt, sequence.limit, sequence.seed)
    if sequence.thinned is None:
        own.tokens, own.marks = sequence.tokens, sequence.marks
    return own


def budget_of(draft: Adapter, target: Footprint, free: int, *, context: int, rows: int) -> Budget:
    """The draft's part of the memory that both models' weights leave free, so that both hold as many tokens. Its
    `total` is what the draft takes in all, weights included."""
    own, theirs = _sequence_bytes(draft.footprint, context), _sequence_bytes(target, context)
    share = free * own // max(1, own + theirs)
    weights = draft.weight_bytes
    return Budget(weights + share, weights, draft.footprint, context=context, widest=AT_ONCE, rows=rows)


def _sequence_bytes(footprint: Footprint, context: int) -> int:
    kept = sum(size * min(context, window or context) for window, size in footprint.groups)
    return kept + footprint.recurrent

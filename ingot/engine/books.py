"""What the engine knows of the sequences that run: their turns, their rows, what is guessed and left out for them.

The engine thread's alone. Books that are found wrong are thrown away whole, and new ones made.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ingot.cache.tail import launch_end
from ingot.engine.admission import Limits
from ingot.engine.loaded import Loaded
from ingot.engine.prefix_cache import Reuse
from ingot.engine.runner import Runner
from ingot.engine.scheduler import Scheduler
from ingot.engine.sequence import Sequence
from ingot.engine.specprefill.prefill import SparsePrefill
from ingot.engine.speculation.controller import Controller
from ingot.engine.speculation.draft_heads import HeadStates
from ingot.engine.speculation.rounds import Speculation
from ingot.engine.step_costs import StepCosts
from ingot.observe.speculation import SpeculationCounts

SCORED_WIDTH = 128
"""Prompt tokens whose logprobs are computed in one launch: each takes a row of logits."""


class Books:
    def __init__(
        self, loaded: Loaded, limits: Limits, counts: SpeculationCounts, seen: Callable[[Sequence], bool]
    ) -> None:
        """`seen` says whether all is there that a sequence has to see."""
        coded = loaded.adapter.live is not None

        def end(sequence: Sequence) -> float:
            """The place at which a launch of it has to end."""
            return launch_end(sequence.computed) if coded and not sequence.request.exact else inf

        def widest(sequence: Sequence) -> int:
            width = loaded.budget.widest_launch(sequence.computed)
            width = min(width, SCORED_WIDTH) if sequence.scoring else width
            return int(min(width, end(sequence) - sequence.computed))

        costs = StepCosts(mixes=loaded.adapter.mixed)
        self.runner = Runner(loaded.adapter, loaded.budget, costs, loaded.cache_bytes, loaded.disk, loaded.codec)
        proposers = [*loaded.proposers]
        if loaded.adapter.head is not None:
            self.runner.heads = HeadStates(loaded.adapter.head, self.runner.rows)
            proposers.append(self.runner.heads)
        controller = Controller(fixed=loaded.guessed_tokens, widest=loaded.adapter.graph_tokens)
        self.speculation = Speculation(proposers, controller, counts, limits.max_sequences, end)
        sparse = self.sparse = self._sparse_prefill(loaded, costs)
        self.scheduler = Scheduler(
            self.runner.room.fits,
            widest,
            self.reuse,
            costs,
            limits.max_sequences,
            limits.target_itl_ms,
            # What is left out of a prompt is not looked at.
            lambda sequence: (sparse is None or sparse.ready(sequence)) and seen(sequence),
        )

    def _sparse_prefill(self, loaded: Loaded, costs: StepCosts) -> SparsePrefill | None:
        if loaded.sparse is None:
            return None
        window = max((group.window or 0 for group in self.runner.rows.groups), default=0)
        return SparsePrefill(loaded.sparse, costs, self.reuse, window)

    @property
    def reuse(self) -> Reuse:
        """The prefixes that are kept."""
        return self.runner.reuse

    def leave(self, sequence: Sequence) -> None:
        """Everything that a sequence holds goes back."""
        self.scheduler.remove(sequence)
        self.runner.release(sequence)
        self.speculation.forget(sequence)
        if self.sparse is not None:
            self.sparse.forget(sequence)

    def rest(self) -> None:
        """Nothing runs: give back what guesses and scores took."""
        self.speculation.rest()
        if self.sparse is not None:
            self.sparse.rest()

    def check(self, held: set[Sequence]) -> None:
        """Raises AssertionError if anything was lost, or is held by none of those that have not ended."""
        self.scheduler.check()
        self.runner.check()
        assert set(self.scheduler.running) | set(self.scheduler.waiting) <= held, "an unknown sequence runs"
        assert set(self.runner.seated) <= held, "a row is held by nobody"
        self.speculation.check(held)
        if self.sparse is not None:
            self.sparse.check()

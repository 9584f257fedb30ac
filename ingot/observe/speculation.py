"""What guessing ahead did since the server started."""

from __future__ import annotations


class SpeculationCounts:
    """One thread adds; any thread may read, without a lock: numbers only grow, and a place in the list stays."""

    def __init__(self) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position: list[int] = []

    def add(self, proposed: int, accepted: int) -> None:
        """A guess of so many tokens, of which the first so many were right."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_per_position.extend([0] * (accepted - len(self.accepted_per_position)))
        for position in range(accepted):
            self.accepted_per_position[position] += 1

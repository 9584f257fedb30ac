"""What guessing ahead did since the server started."""

from __future__ import annotations


class SpeculationCounts:
    """One thread adds; any thread may read, without a lock: numbers only grow, and a place in the list stays."""

    def __init__(self) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.rounds: dict[tuple[int, int], tuple[int, float]] = {}
        """By rows and tokens: how many ran, and their seconds. Without those that computed prompts as well, and plain
        ones that nobody looked at."""
        self.made = 0
        """Rounds that had to make something for themselves and their like, and so say nothing of what these take."""

    def ran(self, rows: int, tokens: int, seconds: float) -> None:
        count, spent = self.rounds.get((rows, tokens), (0, 0.0))
        self.rounds[rows, tokens] = (count + 1, spent + seconds)

    def add(self, proposed: int, accepted: int) -> None:
        """A guess of so many tokens, of which the first so many were right."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_per_position.extend([0] * (accepted - len(self.accepted_per_position)))
        for position in range(accepted):
            self.accepted_per_position[position] += 1

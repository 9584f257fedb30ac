"""What a look into the index gives, and what the model at hand asks of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ingot.cache.codecs.names import RAW
from ingot.cache.records import Record

Reason = Literal["complete", "new_turn", "unseen", "diverged", "evicted", "checkpoint", "salt", "adapter"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What resuming needs, by the model's layers: a checkpoint, and the tokens that each window still sees."""

    checkpoint: bool = False
    windows: tuple[tuple[int, int], ...] = ()  # (group of layers, window)

    @property
    def anywhere(self) -> bool:
        """A sequence can be resumed after any of its tokens, not only at a node's end."""
        return not self.checkpoint and not self.windows


@dataclass(frozen=True, slots=True)
class Match:
    """`known` tokens of the prompt are in the index; the first `length` can be taken over from `records`."""

    known: int = 0
    length: int = 0
    records: tuple[Record, ...] = ()

    @property
    def codec(self) -> str:
        return codec_of(self.records)


def codec_of(records: Iterable[Record]) -> str:
    """What states went through, or some of them."""
    return next((record.codec for record in records if record.codec != RAW), RAW)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a match is no longer. `theirs` are the first tokens of what is kept where the prompt's own differ.

    - complete: all that may be offered is
    - new_turn: nothing that goes on from there was kept
    - unseen: nothing that begins like the prompt was kept
    - diverged: what was kept goes on otherwise
    - evicted: it was kept, and had to go
    - checkpoint: more is known, but this model can be resumed only where messages and chunks end or prompts parted
    - salt: it is kept under another salt of the same tenant
    """

    known: int
    length: int
    reason: Reason
    theirs: tuple[int, ...] = ()
    filed: int = 0  # tokens of the first `length` that would have to be read from disk
    codec: str = RAW  # what the rest went through

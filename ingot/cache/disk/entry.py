"""A record on disk as the rest of the program knows it: what its header says, without its tensors."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

from ingot.cache.disk.header import Header, RecordOwner
from ingot.cache.disk.index import IndexRow


@dataclass(eq=False, slots=True)
class Entry:
    """Shared by the store and by whoever found it there. `lost` is set, by whichever thread, when its file is gone or
    was never written; nothing else changes but when it was used."""

    name: str
    identity: str
    owner: RecordOwner
    before: str
    path: str
    within: str
    oldest: tuple[int, ...]
    begin: int
    tokens: array[int]
    landmark: bool
    checkpoint: bool
    size: int
    used: float = 0.0
    lost: bool = False

    @classmethod
    def of(cls, header: Header, used: float) -> Entry:
        record = header.record
        return cls(
            header.name,
            header.identity,
            header.owner,
            header.before,
            header.path,
            header.within,
            header.oldest,
            record.begin,
            array("q", record.tokens),
            record.landmark,
            record.checkpoint is not None,
            header.nbytes,
            used,
        )

    @classmethod
    def from_row(cls, row: IndexRow) -> Entry:
        """Raises ValueError, TypeError or KeyError where the index holds something else."""
        facts: dict[str, Any] = json.loads(row.facts)
        return cls(
            row.name,
            str(facts["identity"]),
            RecordOwner(str(facts["tenant"]), str(facts["salt"])),
            str(facts["before"]),
            str(facts["path"]),
            str(facts["within"]),
            tuple(int(first) for first in facts["oldest"]),
            int(facts["begin"]),
            array("q", facts["tokens"]),
            bool(facts["landmark"]),
            bool(facts["checkpoint"]),
            row.size,
            row.used,
        )

    def row(self, scope: str) -> IndexRow:
        facts = {
            "identity": self.identity,
            "tenant": self.owner.tenant,
            "salt": self.owner.salt,
            "before": self.before,
            "path": self.path,
            "within": self.within,
            "oldest": self.oldest,
            "begin": self.begin,
            "tokens": self.tokens.tolist(),
            "landmark": self.landmark,
            "checkpoint": self.checkpoint,
        }
        return IndexRow(self.name, scope, self.size, self.used, json.dumps(facts).encode())

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

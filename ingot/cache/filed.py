"""A record that is on disk, as a node of the index holds it: all of a file's tokens, or a part where it was split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ingot.cache.disk.entry import Entry


class Held(Protocol):
    """What some tokens' layers left, wherever it is."""

    @property
    def has_checkpoint(self) -> bool: ...

    def oldest(self, group: int) -> int: ...


@dataclass(frozen=True, slots=True)
class FiledRecord:
    """Tokens [begin, end) of what a file holds."""

    entry: Entry
    begin: int
    end: int

    @classmethod
    def whole(cls, entry: Entry) -> FiledRecord:
        return cls(entry, entry.begin, entry.end)

    @property
    def there(self) -> bool:
        """As far as is known."""
        return not self.entry.lost

    @property
    def has_checkpoint(self) -> bool:
        return self.entry.checkpoint and self.end == self.entry.end

    def oldest(self, group: int) -> int:
        """The first token whose keys and values it has in a group; behind its end where it has none."""
        first = self.entry.oldest[group]
        if first < self.entry.begin:  # it reaches back so as to need nobody before it: that is about its end
            return first if self.end == self.entry.end else self.end
        return max(first, self.begin)

    def holds_all_of(self, record: Held) -> bool:
        """Whether nothing that a record of the same tokens has is missing here."""
        if record.has_checkpoint and not self.has_checkpoint:
            return False
        return all(self.oldest(group) <= record.oldest(group) for group in range(len(self.entry.oldest)))

    def part(self, begin: int, end: int) -> FiledRecord:
        return replace(self, begin=begin, end=end)

    def split(self, at: int) -> tuple[FiledRecord, FiledRecord]:
        return self.part(self.begin, at), self.part(at, self.end)

"""The files that a model's GGUF parts are in, told by their names. Opens none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ModelError

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MOST_NAMED = 8  # of missing parts


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says: which of how many."""

    stem: str
    number: int  # from 1
    count: int


def part_name(name: str) -> PartName | None:
    """None for a name that says nothing of parts."""
    said = _NUMBERED.fullmatch(name)
    return said and PartName(said["stem"], int(said["number"]), int(said["count"]))


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of, in order. Raises ModelError that names missing ones."""
    said = part_name(path.name)
    if said is None:
        return [path]
    if not 1 <= said.number <= said.count:
        raise ModelError(f"{path.name} calls itself part {said.number} of {said.count}")
    there = {found.name: found for found in path.parent.iterdir()}
    # The names of one split differ in their number alone, and in letters' case nowhere.
    tail = path.name[len(said.stem) + 6 :]
    wanted = [f"{said.stem}-{number:05}{tail}" for number in range(1, said.count + 1)]
    missing = [name for name in wanted if name not in there]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ModelError(
            f"{path.name} is one of {said.count} parts, of which these are missing beside it: "
            f"{', '.join(missing[:MOST_NAMED])}{more}"
        )
    return [there[name] for name in wanted]

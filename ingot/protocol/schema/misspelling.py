"""Whether an unknown name is a known one, misspelt.

Only a name that is one or two slips away is: a letter left out, put in, replaced, or swapped with its neighbour. Names
that are merely alike (`max_new_tokens`, `top_a`) are other servers' own, and their clients mean them.
"""

from __future__ import annotations

from collections.abc import Iterable


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a slip of, or None."""
    near = [(slips, each) for each in known if (slips := distance(name, each, most=_allowed(name, each))) is not None]
    return min(near)[1] if near else None


def _allowed(name: str, known: str) -> int:
    """Slips that leave names of this length recognisable."""
    length = min(len(name), len(known))
    return 2 if length >= 8 else 1 if length >= 4 else 0


def distance(one: str, other: str, *, most: int) -> int | None:
    """Slips between two texts, after Damerau and Levenshtein; None where there are more than `most`."""
    if abs(len(one) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        above, before, row = before, row, [i]
        for j, against in enumerate(other, start=1):
            slips = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                slips = min(slips, above[j - 2] + 1)
            row.append(slips)
    return row[-1] if row[-1] <= most else None

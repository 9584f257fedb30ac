"""One model over several ranks on this machine: the cost of describing a step to them, the time of a sum over MLX's
ring, and their speed relative to one process.

python -m bench.ranks                         all of it
python -m bench.ranks speed --streams 1,8     one part; `--help` after its name lists its flags
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.ranks import speed, sums, telling
from ingot.errors import IngotError

PARTS: dict[str, Callable[[Sequence[str]], None]] = {
    "telling": telling.main,
    "sums": sums.main,
    "speed": speed.main,
}


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] not in PARTS:
        sys.exit(f"{__doc__}\nThe parts are {', '.join(PARTS)}.")
    try:
        for name in arguments[:1] or PARTS:
            PARTS[name](arguments[1:])
    except IngotError as error:
        sys.exit(f"bench.ranks: {error.message}")


if __name__ == "__main__":
    main(sys.argv[1:])

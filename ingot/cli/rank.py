"""`python -m ingot.cli.rank`: a process of a group, which `ingot serve` starts as their parent. No command for people.

It does what `ingot serve` does, with its place in the group told to it over its standard input.
"""

from __future__ import annotations

import sys

from ingot.cli.main import main
from ingot.distributed.hosts import read_rank_assignment

if __name__ == "__main__":
    sys.exit(main(["serve", *read_rank_assignment().arguments]))

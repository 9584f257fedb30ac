"""`python -m ingot.cli.rank`: one rank of a group, started by `ingot serve`. Not a command for users.

It is `ingot serve` with the rank's assignment read from standard input.
"""

from __future__ import annotations

import sys

from ingot.cli.main import main
from ingot.distributed.hosts import read_rank_assignment

if __name__ == "__main__":
    sys.exit(main(["serve", *read_rank_assignment().arguments]))

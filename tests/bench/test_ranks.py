from __future__ import annotations

import pytest

from bench.ranks import sums
from bench.ranks.__main__ import PARTS, main


def test_a_part_that_there_is_not_is_answered_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="The parts are " + ", ".join(PARTS)):
        main(["sum"])


@pytest.mark.slow
def test_ranks_add_and_say_what_it_took() -> None:
    assert sums.measured(2, 64, 10) > 0.0

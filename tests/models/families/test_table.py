"""The page of all families says what the code does."""

from __future__ import annotations

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.models.families import table

pytestmark = pytest.mark.skipif(not native.available(), reason="latent attention is mlx-lm's own without kernels")


def test_the_page_of_all_families_is_what_the_command_writes() -> None:
    assert table.PAGE.read_text() == table.page(), "run python -m tests.models.families.table"


def test_at_least_125_families_are_fast_on_every_device() -> None:
    speeds = [row[1:4] for row in table.rows()]
    assert sum("fast" in row[:2] and row[2] in ("fast", "graph") for row in speeds) >= 125


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("llama", ("fast", "fast", "graph", "", "", "llama", "yes")),
        ("qwen3_5", ("fast", "fast", "graph", "yes", "yes", "qwen3-coder")),
        ("deepseek_v41", ("parts", "parts", "parts", "", "")),
        ("afm7", ("in turn", "in turn", "in turn", "", "")),
        ("phi3small", ("no", "no", "no")),
    ],
)
def test_a_row_has_what_is_known_of_its_family(row: str, found: tuple[str, ...]) -> None:
    [own] = [each[1:] for each in table.rows() if each[0] == f"`{row}`"]
    assert own[: len(found)] == found

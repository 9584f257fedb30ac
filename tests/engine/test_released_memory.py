"""Memory that nobody needs any more is given back."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ingot.engine.engine import release_unused_memory


def test_what_is_drawn_next_refers_to_no_first_weights_that_nobody_computed(tmp_path: Path) -> None:
    def draws() -> int:
        mx.export_to_dot(str(tmp_path / "state.dot"), *mx.random.state)
        return (tmp_path / "state.dot").read_text().count("RandomBits")

    mx.eval(mx.random.state)
    for _ in range(3):
        nn.Linear(4, 4)
    assert draws() >= 3
    release_unused_memory()
    assert draws() == 0

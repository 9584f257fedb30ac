"""What MLX is asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels.gpu.launchers import MlxLauncher
from ingot.kernels.gpu.texts import Prelude
from ingot.kernels.paged.kernels import PagedAttention, Rows, Shape, Slabs, token_slots
from ingot.kernels.paged.tuning import TUNINGS
from tests.kernels.paged.memory import START


@pytest.mark.parametrize("prelude", ["cuda", "metal"])
def test_a_kernel_is_made_once_and_called_with_threads_not_groups(
    prelude: Prelude, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    called: dict[str, dict[str, Any]] = {}

    def make(**options: Any) -> Any:
        def run(**call: Any) -> list[mx.array]:
            called.setdefault(options["name"].split("_")[2], call)
            return [mx.zeros(call["output_shapes"][0], call["output_dtypes"][0])]

        made.append(options)
        return run

    monkeypatch.setattr(mx.fast, f"{prelude}_kernel", make)
    slabs = Slabs(*[[mx.zeros((2, 2, 64, 32), mx.float16)] * 3] * 2)
    attention = PagedAttention(MlxLauncher(prelude), TUNINGS[prelude], Shape(12, 2, 32, 32), mx.float16, scale=1.0)
    keys = mx.zeros((5, 2, 32), mx.float16)
    for _ in range(2):
        done = attention.write(keys, keys, token_slots([(0, place) for place in range(5)]), slabs, START)
        attended = attention.attend(mx.zeros((3, 12, 32), mx.float16), Rows.of([[0, 1]] * 3, [7, 9, 65]), slabs, done)
    assert attended.shape == (3, 12, 32) and attended.dtype == mx.float16

    names = [options["name"].split("_")[2] for options in made]
    located = ["locate"] if prelude == "cuda" else []
    assert names == [*located, "write", "attend", "merge"], "once each"
    assert not any(options["ensure_row_contiguous"] for options in made), "a slab must not be copied"
    write, attend, merge = called["write"], called["attend"], called["merge"]
    assert (write["grid"], write["threadgroup"]) == ((5 * 128, 2, 1), (128, 1, 1))
    parts = 1 if prelude == "cuda" else 2
    assert (attend["grid"], attend["threadgroup"]) == ((parts * 128, 2, 3), (128, 1, 1))
    assert (merge["grid"], merge["threadgroup"]) == ((128, 12, 3), (128, 1, 1))
    assert [len(call["inputs"]) for call in called.values()] == [len(options["input_names"]) for options in made]
    assert dict(attend["template"])["PART"] == 6 // parts and attend["output_shapes"] == [(3, 12, 1, 36)]

"""How many operations a layer of a decode step is, on GPUs."""

from __future__ import annotations

import mlx.core as mx
import pytest

from bench.operations import NARROW, a_layer, launches
from bench.random_models import SHAPES
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
GPU = Device("cuda", "a GPU", 1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_is_eleven_launches(family: str, rows: int) -> None:
    found = a_layer({**SHAPES["llama-8b"], **NARROW, "model_type": family}, GPU, rows)
    assert launches(found) == 11, found
    assert (found["Matmul"], found["turn"], found["attend"] + found["attend_wide"], found["RMSNorm"]) == (4, 1, 1, 2)
    assert sum(found.values()) <= 17, "with what only looks at memory otherwise"

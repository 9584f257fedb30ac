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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_is_eight_launches(family: str, rows: int) -> None:
    found = a_layer({**SHAPES["llama-8b"], **NARROW, "model_type": family}, GPU, rows)
    assert launches(found) == 8, found
    assert (found["turn"], found["attend_wide"], found["norm"]) == (1, 1, 2)
    assert (found["multiply"], found["multiply_gated"]) == (3, 1), "gates come out of their product"

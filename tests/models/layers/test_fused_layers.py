"""Which models' layers become one operation. What it computes is tested with every other way in `test_families`."""

from __future__ import annotations

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.models.families.registry import MODEL_FAMILIES
from ingot.models.layers.fused_layers import fuse_layers
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.rope import swap_ropes
from tests.models.layers import family_configs

FUSED = ("ernie4_5", "helium", "internlm3", "llama", "mimo", "qwen2", "qwen3", "seed_oss", "telechat3")
OTHERS = [family.name for family in MODEL_FAMILIES.values() if family.layers and family.name not in FUSED]
pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


@pytest.mark.parametrize("name", FUSED)
def test_layers_of_llamas_arithmetic_become_one_operation_with_the_same_weights(name: str) -> None:
    model = family_configs.build(name)
    before = dict(named_parameters(model))
    swap_ropes(model)
    assert fuse_layers(model)
    assert {path: id(array) for path, array in named_parameters(model)} == {
        path: id(array) for path, array in before.items()
    }


@pytest.mark.parametrize("name", [*OTHERS, "llama-window", "llama-dynamic"])
def test_layers_of_another_arithmetic_stay_as_they_are(name: str) -> None:
    model = family_configs.build(name)
    swap_ropes(model)
    assert not fuse_layers(model)

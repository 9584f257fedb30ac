"""MLPs with a cheaper gate, against the ones that they extend."""

from __future__ import annotations

import importlib

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.models.gates import KNOWN, DividedGate, swap_gates
from ingot.models.modules import parameters
from tests import tiny


def test_a_swapped_mlp_gives_the_same_with_the_same_weights() -> None:
    model = tiny.build("llama")
    mlp, before = model.model.layers[0].mlp, dict(parameters(model))
    x = 30 * mx.random.normal((1, 7, 32), key=mx.random.key(1))
    x = mx.concatenate([x, mx.full((1, 1, 32), 1e4), mx.full((1, 1, 32), -1e4)], axis=1)
    expected = mlp(x)
    assert swap_gates(model) == 3
    assert isinstance(model.model.layers[0].mlp, DividedGate)
    found = model.model.layers[0].mlp(x)
    assert mx.all(mx.abs(found - expected) <= 1e-5 * mx.abs(expected).max(axis=-1, keepdims=True)).item()
    assert {path: id(array) for path, array in parameters(model)} == {path: id(array) for path, array in before.items()}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_class_is_one_of_mlx_lms(name: str) -> None:
    module, kind = name.split(".")
    assert isinstance(getattr(importlib.import_module(f"mlx_lm.models.{module}"), kind), type)

"""Queries and keys turned together, against the RoPE modules that turn them one by one."""

from __future__ import annotations

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, Row
from ingot.models.layers.modules import positioned_rope
from ingot.models.layers.rope import SharedRopes
from tests.models.layers.test_modules import ROPES

MIXED = MixedBatch(
    (ForwardBatch((Row(0, ()), Row(1, ())), 1, (7, 30), (7, 30)), ForwardBatch((Row(2, ()),), 3, (4,), (4,)))
)


@pytest.mark.parametrize("name", ROPES)
def test_queries_and_keys_are_turned_to_their_positions(name: str) -> None:
    rope = positioned_rope(ROPES[name]())
    turning = SharedRopes().of(rope)
    assert turning is not None
    queries = mx.random.normal((5, 3, 1, 8), key=mx.random.key(1))
    keys = mx.random.normal((5, 2, 1, 8), key=mx.random.key(2))
    at = mx.array([7, 30, 4, 5, 6])
    for found, given in zip(turning(queries, keys, MIXED), (queries, keys), strict=True):
        assert mx.allclose(found, rope(given, offset=at), atol=1e-4).item()


def test_layers_with_the_same_rotation_share_its_angles() -> None:
    turnings = SharedRopes()
    assert turnings.of(positioned_rope(ROPES["plain"]())) is turnings.of(positioned_rope(ROPES["plain"]()))
    assert turnings.of(positioned_rope(ROPES["plain"]())) is not turnings.of(positioned_rope(ROPES["partial"]()))
    assert turnings.of(ROPES["plain"]()) is None

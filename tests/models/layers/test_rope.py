"""RoPE at explicit positions, and of queries and keys together, against the RoPE modules of MLX and mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, Row, TokenPositions
from ingot.models.layers.rope import PeriodsRope, PositionedRope, SharedRopes, positioned_rope, swap_ropes
from ingot.upstream import rope_utils
from tests import tiny

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "plain": lambda: nn.RoPE(8, base=500.0),
    "traditional": lambda: nn.RoPE(8, traditional=True),
    "partial": lambda: nn.RoPE(4, scale=0.5),
    "llama3": lambda: rope_utils.Llama3RoPE(8, 128, scaling_config=LLAMA3),
    "yarn": lambda: rope_utils.YarnRoPE(8, scaling_factor=4.0, original_max_position_embeddings=32),
    "longrope": lambda: rope_utils.SuScaledRoPE(8, max_position_embeddings=256, original_max_position_embeddings=64),
    "proportional": lambda: rope_utils.ProportionalRoPE(8, 4),
    "backwards": lambda: PeriodsRope(mx.array([-1.0, -10.0, 100.0])),
}
MIXED = MixedBatch(
    (ForwardBatch((Row(0, ()), Row(1, ())), 1, (7, 30), (7, 30)), ForwardBatch((Row(2, ()),), 3, (4,), (4,)))
)


@pytest.mark.parametrize("name", ROPES)
def test_explicit_positions_that_are_consecutive_give_what_the_fast_kernel_gives(name: str) -> None:
    rope = ROPES[name]()
    x = mx.random.normal((2, 3, 5, 8), key=mx.random.key(1))
    fast = rope(x, offset=mx.array([7, 30]))
    at = mx.array([[7, 8, 9, 10, 11], [30, 31, 32, 33, 34]])
    assert mx.allclose(positioned_rope(ROPES[name]())(x, offset=TokenPositions(at)), fast, atol=1e-4).item()


@pytest.mark.parametrize("name", ROPES)
def test_a_token_is_rotated_to_its_own_position_whatever_is_in_its_batch(name: str) -> None:
    rope = positioned_rope(ROPES[name]())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(2))
    spread = rope(x, offset=TokenPositions(mx.array([[50, 2, 17]])))
    for index, position in enumerate((50, 2, 17)):
        assert mx.allclose(
            spread[:, :, index : index + 1], rope(x[:, :, index : index + 1], offset=position), atol=1e-4
        ).item()


def test_an_offset_added_to_the_numbers_of_a_batchs_tokens_gives_their_positions() -> None:
    assert (mx.arange(MIXED.tokens) + MIXED.offset).tolist() == [[7, 30, 4, 5, 6]]


def test_every_rope_of_a_model_is_swapped_for_one_with_the_same_attributes() -> None:
    model = tiny.build("llama")
    base = model.model.layers[0].self_attn.rope.base
    assert swap_ropes(model) == 3
    assert all(isinstance(layer.self_attn.rope, PositionedRope) for layer in model.model.layers)
    assert model.model.layers[0].self_attn.rope.base == base


@pytest.mark.parametrize("name", ROPES)
def test_queries_and_keys_are_rotated_to_their_positions(name: str) -> None:
    rope = positioned_rope(ROPES[name]())
    shared = SharedRopes().rope_for(rope)
    assert shared is not None
    queries = mx.random.normal((5, 3, 1, 8), key=mx.random.key(1))
    keys = mx.random.normal((5, 2, 1, 8), key=mx.random.key(2))
    at = mx.array([7, 30, 4, 5, 6])
    for found, plain in zip(shared(queries, keys, MIXED), (queries, keys), strict=True):
        assert mx.allclose(found, rope(plain, offset=at), atol=1e-4).item()


def test_layers_with_the_same_rotation_share_its_angles() -> None:
    ropes = SharedRopes()
    assert ropes.rope_for(positioned_rope(ROPES["plain"]())) is ropes.rope_for(positioned_rope(ROPES["plain"]()))
    assert ropes.rope_for(positioned_rope(ROPES["plain"]())) is not ropes.rope_for(positioned_rope(ROPES["partial"]()))
    assert ropes.rope_for(ROPES["plain"]()) is None

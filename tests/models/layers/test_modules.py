import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import TokenPositions
from ingot.models.layers.modules import PositionedRope, positioned_rope, swap_ropes
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
}


@pytest.mark.parametrize("name", ROPES)
def test_explicit_positions_that_are_consecutive_give_what_the_fast_kernel_gives(name: str) -> None:
    rope = ROPES[name]()
    x = mx.random.normal((2, 3, 5, 8), key=mx.random.key(1))
    fast = rope(x, offset=mx.array([7, 30]))
    at = mx.array([[7, 8, 9, 10, 11], [30, 31, 32, 33, 34]])
    assert mx.allclose(positioned_rope(ROPES[name]())(x, offset=TokenPositions(at)), fast, atol=1e-4).item()


@pytest.mark.parametrize("name", ROPES)
def test_a_token_is_rotated_to_its_own_position_whatever_stands_beside_it(name: str) -> None:
    rope = positioned_rope(ROPES[name]())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(2))
    spread = rope(x, offset=TokenPositions(mx.array([[50, 2, 17]])))
    for place, position in enumerate((50, 2, 17)):
        assert mx.allclose(
            spread[:, :, place : place + 1], rope(x[:, :, place : place + 1], offset=position), atol=1e-4
        ).item()


def test_every_rope_of_a_model_is_swapped_for_one_with_the_same_attributes() -> None:
    model = tiny.build("llama")
    base = model.model.layers[0].self_attn.rope.base
    assert swap_ropes(model) == 3
    assert all(isinstance(layer.self_attn.rope, PositionedRope) for layer in model.model.layers)
    assert model.model.layers[0].self_attn.rope.base == base

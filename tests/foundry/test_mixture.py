"""How a mixture is made of a dense model: on small layers, without training."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from foundry.mixture import _make_experts, router_of, routing_figures, routing_shares
from foundry.shapes import SHAPES
from ingot.upstream import import_upstream

HIDDEN, WIDTH = 32, 64


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def block_of(experts: int, top: int, width: int) -> nn.Module:
    family = import_upstream("mlx_lm.models.qwen3_moe")
    config = SHAPES["mixture"].config | {
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": top,
    }
    block: nn.Module = family.Qwen3MoeSparseMoeBlock(family.ModelArgs.from_dict(config))
    return block


@pytest.fixture
def states() -> np.ndarray:
    """Around four directions."""
    chance = np.random.default_rng(0)
    centres = chance.normal(size=(4, HIDDEN))
    return (centres[np.arange(400) % 4] + 0.2 * chance.normal(size=(400, HIDDEN))).astype(np.float32)


def test_a_router_begins_with_the_clusters_of_what_it_sees(states: np.ndarray) -> None:
    router = router_of(states, 4, 2, np.random.default_rng(0))
    first = np.argmax(states @ router.T, axis=1)
    groups = [first[start::4] for start in range(4)]
    assert all(len({*group.tolist()}) <= 2 for group in groups) and len({*first.tolist()}) > 1


def test_experts_say_together_what_the_mlp_says(states: np.ndarray) -> None:
    mx.random.seed(0)
    mlp, block = _Mlp(), block_of(4, 2, WIDTH // 2)
    block.gate.weight = mx.array(router_of(states, 4, 2, np.random.default_rng(0)))
    x = mx.array(states)
    wanted = mlp(x)
    before = float(mx.linalg.norm(block(x) - wanted))
    _make_experts(block, mlp, states)
    assert float(mx.linalg.norm(block(x) - wanted)) < 0.2 * min(before, float(mx.linalg.norm(wanted)))


def test_a_token_has_as_many_experts_as_it_is_to_have(states: np.ndarray) -> None:
    shares = routing_shares(block_of(8, 3, 16), mx.array(states))
    assert ((shares > 0).sum(axis=1) == 3).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


def test_even_routing_has_the_largest_entropy(states: np.ndarray) -> None:
    layer, model = nn.Module(), nn.Module()
    layer.mlp, model.model = block_of(8, 2, 16), nn.Module()
    model.model.layers = [layer, layer]
    x = mx.array(states)[None]
    found = routing_figures(model, [x, x])
    assert 0 < found["entropy of choices within 64 tokens"] <= found["entropy of choices"] <= 1
    assert found["guessed from the layer before"] == 1.0
    assert found["choices of the most used quarter"] >= 0.25

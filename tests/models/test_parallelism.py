"""How a model is split over ranks, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.errors import ModelError
from ingot.models.layers.modules import named_parameters
from ingot.models.parallelism import AllReduceLinear, ModelSharding, parallel_modes, shard_model, swap_sharded_layers
from tests import tiny


class Ranks:
    """As much of a group as dealing out asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def split(kind: str, way: Any, size: int, bits: int | None = None, **changed: Any) -> Any:
    config = {**tiny.CONFIGS[kind], **changed}
    model = tiny.random_models.build(config)
    if bits is not None:
        nn.quantize(model, 32, bits)
    shard_model(model, config, ModelSharding(way, Ranks(size)))
    return model


def test_a_class_says_how_its_models_can_be_split() -> None:
    assert parallel_modes(tiny.build("llama")) == ("tensor",)
    assert parallel_modes(tiny.build("moe")) == ("tensor", "pipeline")
    assert parallel_modes(tiny.build("window")) == ()


def test_what_a_family_cannot_do_is_refused_with_what_it_can() -> None:
    with pytest.raises(ModelError, match=r"type llama cannot be split over ranks as pipeline. It can be: tensor"):
        split("llama", "pipeline", 2)
    with pytest.raises(ModelError, match="It runs on one rank"):
        split("window", "tensor", 2)


def test_heads_that_cannot_be_dealt_out_evenly_are_refused() -> None:
    with pytest.raises(ModelError, match="4 attention heads cannot be split over 3 ranks"):
        split("llama", "tensor", 3)
    with pytest.raises(ModelError, match="1 KV heads cannot be split over 2 ranks"):
        split("single", "tensor", 2)


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot be split over 4 ranks"):
        split("moe", "pipeline", 4)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("llama", {"intermediate_size": 96}, "the 3 groups of 32 quantised columns of model.layers.0.mlp.down_proj"),
        (
            "llama",
            {"num_attention_heads": 2},
            "the 1 groups of 32 quantised columns of model.layers.0.self_attn.o_proj",
        ),
        (
            "moe",
            {"moe_intermediate_size": 32},
            "the 1 groups of 32 quantised columns of model.layers.0.mlp.switch_mlp.d",
        ),
    ],
)
def test_groups_of_packed_columns_that_do_not_come_out_even_are_refused(
    kind: str, changed: dict[str, int], message: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    with pytest.raises(ModelError, match=f"cannot be split over 2 ranks: {message}"):
        split(kind, "tensor", 2, 4, **sizes | changed)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("kind", "way", "part"), [("llama", "tensor", 1 / 2), ("moe", "tensor", 1 / 2), ("moe", "pipeline", 2 / 3)]
)
def test_a_rank_holds_its_part_of_packed_layers_and_no_more(kind: str, way: str, part: float, bits: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    own, all_of_it = (
        sum(array.nbytes for path, array in named_parameters(split(kind, way, ranks, bits, **sizes)) if "proj" in path)
        for ranks in (2, 1)
    )
    assert own == pytest.approx(part * all_of_it)


def test_layers_dealt_out_by_their_outputs_are_plain_and_the_others_add_up() -> None:
    model = split("llama", "tensor", 2)
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj) is nn.Linear and attention.q_proj.weight.shape == (16, 32)
    assert isinstance(attention.o_proj, AllReduceLinear) and attention.o_proj.linear.weight.shape == (32, 16)
    assert (attention.n_heads, attention.n_kv_heads) == (2, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sharded_layer_gives_what_mlxs_own_gives(packed: bool) -> None:
    group = mx.distributed.init()
    plain: Any = nn.Linear(64, 32)
    made: Any = nn.QuantizedLinear.from_linear(plain, 32, 4) if packed else plain
    model = nn.Sequential(
        *(nn.layers.distributed.shard_linear(made, way, group=group) for way in ("all-to-sharded", "sharded-to-all"))
    )
    x = mx.random.normal((3, 64))
    expected = [layer(x) for layer in model.layers]
    assert swap_sharded_layers(model) == 2
    for layer, y in zip(model.layers, expected, strict=True):
        assert mx.allclose(layer(x), y, atol=1e-6)

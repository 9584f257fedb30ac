"""PEFT's configuration, as PEFT reads it, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import AdapterError
from ingot.models.lora.peft import PeftConfig

QUERY = "model.layers.3.self_attn.q_proj"
UP = "model.layers.11.mlp.up_proj"


def config(**stated: Any) -> PeftConfig:
    return PeftConfig.of({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **stated})


@pytest.mark.parametrize(
    "targets, query, up",
    [
        (["q_proj"], True, False),
        (["self_attn.q_proj", "up_proj"], True, True),
        (["proj"], False, False),
        (r".*\.(3|11)\.mlp\.up_proj", False, True),
        ("q_proj", False, False),
        ("all-linear", True, True),
    ],
)
def test_targets_are_ends_of_paths_or_an_expression_for_whole_ones(targets: Any, query: bool, up: bool) -> None:
    found = config(target_modules=targets)
    assert (found.is_for(QUERY), found.is_for(UP)) == (query, up)


def test_some_layers_can_be_chosen() -> None:
    found = config(target_modules=["q_proj", "up_proj"], layers_to_transform=[3, 4])
    assert found.is_for(QUERY) and not found.is_for(UP)
    named = config(target_modules=["q_proj", "up_proj"], layers_to_transform=11, layers_pattern="layers")
    assert named.is_for(UP) and not named.is_for(QUERY)
    assert not config(layers_to_transform=[3], layers_pattern=["h"]).is_for(QUERY)


def test_modules_can_be_left_out() -> None:
    assert not config(target_modules="all-linear", exclude_modules=["q_proj"]).is_for(QUERY)
    assert not config(exclude_modules=r".*\.3\..*").is_for(QUERY)


def test_what_an_adapter_adds_is_weighed_by_its_rank_or_its_root() -> None:
    assert config().scale_of(QUERY) == 2.0
    assert config(use_rslora=True).scale_of(QUERY) == pytest.approx(16 / 8**0.5)


def test_patterns_give_some_modules_other_ranks_and_weights_and_the_first_that_matches_counts() -> None:
    found = config(
        rank_pattern={"q_proj": 4, r"layers\.3\..*": 2}, alpha_pattern={r"layers\.1.\.mlp\.up_proj": 32, "up_proj": 1}
    )
    assert (found.rank_of(QUERY), found.scale_of(QUERY)) == (4, 4.0)
    assert (found.rank_of(UP), found.scale_of(UP)) == (8, 4.0)
    assert found.rank_of("model.layers.3.mlp.up_proj") == 2
    assert config(rank_pattern={"proj": 4}).rank_of(QUERY) == 8


@pytest.mark.parametrize(
    "stated, said",
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"trainable_token_indices": [3]}, "embeddings of its own"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is pissa_niter_16"),
        ({"init_lora_weights": "OLoRA"}, "changed base"),
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"r": "many"}, "makes no sense"),
        ({"target_modules": "("}, "makes no sense"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(stated: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        config(**stated)


def test_ways_to_begin_that_leave_the_base_as_it_is_are_fine() -> None:
    for begun in (True, False, "gaussian", "eva", "orthogonal"):
        assert config(init_lora_weights=begun).rank == 8

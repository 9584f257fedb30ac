"""Adapters' files: what they hold, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.engine.admission import load_lora
from ingot.errors import AdapterError
from ingot.kernels.device import current_device
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.lora.weights import MlxLoraConfig, PeftLoraConfig, read_lora
from tests import tiny
from tests.models.lora.made import matrices, write_mlx, write_peft

PATH = "model.layers.1.self_attn.q_proj"
SIZES = {PATH: (32, 32)}


@pytest.fixture(scope="module")
def model() -> ModelAdapter:
    return adapt_model(tiny.build("moe"), tiny.CONFIGS["moe"], current_device())


def test_both_forms_are_read_with_their_weight(tmp_path: Path) -> None:
    made = matrices(SIZES, 4, 1)
    forms = write_mlx(tmp_path / "mlx", made, rank=4, scale=3.0), write_peft(tmp_path / "peft", made, rank=4)
    for folder, scale in zip(forms, (3.0, 0.1), strict=True):
        found = read_lora(folder)
        assert found.rank == 4 and found.pairs.keys() == {PATH}
        assert mx.allclose(found.pairs[PATH].a, made[PATH][0])
        assert mx.allclose(found.pairs[PATH].b, scale * made[PATH][1])
    assert read_lora(forms[0]).digest != read_lora(forms[1]).digest


def test_a_changed_configuration_is_another_adapter(tmp_path: Path) -> None:
    made = matrices(SIZES, 4, 1)
    digests = {read_lora(write_mlx(tmp_path, made, rank=4, scale=scale)).digest for scale in (1.0, 2.0)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({f"{PATH}.lora_a": (32, 4), f"{PATH}.lora_b": (4, 32), f"{PATH}.m": (32,)}, "no part of a plain LoRA"),
        ({f"{PATH}.lora_a": (32, 4)}, "one of its two matrices is missing"),
        ({f"{PATH}.lora_a": (32, 5), f"{PATH}.lora_b": (5, 32)}, "configuration says 4"),
        ({f"{PATH}.lora_a": (2, 4, 32), f"{PATH}.lora_b": (2, 32, 4)}, "experts"),
        ({}, "no weights"),
        ({"model.embed_tokens.lora_a": (96, 4), "model.embed_tokens.lora_b": (4, 32)}, "no linear layer"),
        ({"model.layers.9.mlp.up_proj.lora_a": (32, 4), "model.layers.9.mlp.up_proj.lora_b": (4, 32)}, "no linear"),
        ({f"{PATH}.lora_a": (16, 4), f"{PATH}.lora_b": (4, 32)}, "16 inputs"),
        (
            {
                "model.layers.0.mlp.switch_mlp.up_proj.lora_a": (32, 4),
                "model.layers.0.mlp.switch_mlp.up_proj.lora_b": (4, 16),
            },
            "experts",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tensors: dict[str, tuple[int, ...]], message: str, model: ModelAdapter, tmp_path: Path
) -> None:
    write_mlx(tmp_path, matrices(SIZES, 4, 1), rank=4)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: mx.ones(size) for name, size in tensors.items()})
    with pytest.raises(AdapterError, match=message):
        load_lora(model, tmp_path, most_rank=8)
    assert model.loras.nbytes == 0


def test_weights_that_the_configuration_is_not_for_are_refused(model: ModelAdapter, tmp_path: Path) -> None:
    write_mlx(tmp_path, matrices(SIZES, 4, 1), rank=4, num_layers=1)
    with pytest.raises(AdapterError, match="which its configuration is not for"):
        load_lora(model, tmp_path, most_rank=8)
    write_peft(tmp_path / "peft", matrices(SIZES, 4, 1), rank=4, target_modules=["k_proj"])
    with pytest.raises(AdapterError, match="which its configuration is not for"):
        load_lora(model, tmp_path / "peft", most_rank=8)


def test_a_rank_that_is_too_high_is_refused(model: ModelAdapter, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank is 4, more than the 2"):
        load_lora(model, write_mlx(tmp_path, matrices(SIZES, 4, 1), rank=4), most_rank=2)


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="no JSON object"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(AdapterError, match="neither"):
        read_lora(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="may hold programs"):
        read_lora(tmp_path)
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(AdapterError, match="damaged"):
        read_lora(tmp_path)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_other_ways_of_mlx_lm_are_refused(kind: str) -> None:
    with pytest.raises(AdapterError, match=f"fine_tune_type is {kind}"):
        MlxLoraConfig.of({"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 1.0}})


@pytest.mark.parametrize(
    "last, keys, inside",
    [(0, None, True), (2, None, True), (1, None, False), (0, ["self_attn.q_proj"], True), (0, ["mlp.up_proj"], False)],
)
def test_mlx_lm_counts_layers_from_the_last(last: int, keys: Any, inside: bool) -> None:
    stated = {"num_layers": last, "lora_parameters": {"rank": 4, "scale": 1.0, "keys": keys}}
    assert MlxLoraConfig.of(stated).is_for(PATH, 3) == inside


QUERY = "model.layers.3.self_attn.q_proj"
UP = "model.layers.11.mlp.up_proj"


def config(**stated: Any) -> PeftLoraConfig:
    return PeftLoraConfig.of({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **stated})


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
    "stated, message",
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
def test_what_cannot_be_honoured_is_refused_by_name_of_peft(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        config(**stated)


def test_ways_to_begin_that_leave_the_base_as_it_is_are_fine() -> None:
    for initialisation in (True, False, "gaussian", "eva", "orthogonal"):
        assert config(init_lora_weights=initialisation).rank == 8

"""The shipped models, through ingot's own engine. Bounds lie well below what the model cards report."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from safetensors import safe_open

from foundry.evaluate import exactness, perplexity, recall, running
from foundry.package import MODELS, config
from foundry.shapes import SHAPES
from ingot.engine.engine import Engine

SHIPPED = [name for name in SHAPES if (MODELS / name).is_dir()]
MEGABYTE = 1_000_000
PERPLEXITY = {"dense": 45, "draft": 90, "window": 50, "hybrid": 50}
RECALL_AT_1K = {"dense": 0.9, "draft": 0.5, "window": 0.9, "hybrid": 0.95}
TOOLS = {"dense": 0.8, "draft": 0.3, "window": 0.8, "hybrid": 0.85}
MTP_HEAD = {
    "fc.weight",
    "pre_fc_norm_hidden.weight",
    "pre_fc_norm_embedding.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"layers.0.self_attn.{part}_norm.weight" for part in "qk"),
}


@pytest.fixture(scope="module", params=SHIPPED)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with running(MODELS / model) as started:
        yield started


def test_no_model_is_larger_than_12_megabytes_and_all_together_not_than_40() -> None:
    sizes = {name: (MODELS / name / "model.safetensors").stat().st_size for name in SHIPPED}
    assert max(sizes.values()) <= 12 * MEGABYTE
    assert sum(sizes.values()) <= 40 * MEGABYTE


def test_a_model_ships_with_the_configuration_of_its_shape(model: str) -> None:
    assert json.loads((MODELS / model / "config.json").read_text()) == config(SHAPES[model])


def test_a_model_knows_some_english(model: str, engine: Engine) -> None:
    assert perplexity(engine, 3) < PERPLEXITY[model]


def test_a_model_recalls_values_from_anywhere_in_a_thousand_tokens(model: str, engine: Engine) -> None:
    assert recall(engine, 1024, 1) >= RECALL_AT_1K[model]


def test_a_model_answers_and_calls_tools_exactly_and_stops_by_itself(model: str, engine: Engine) -> None:
    assert exactness(engine, SHAPES[model].style, range(16))["tool"] >= TOOLS[model]


def test_the_hybrids_head_has_the_tensors_of_a_published_checkpoint() -> None:
    with safe_open(MODELS / "hybrid" / "model.safetensors", "numpy") as file:
        names = {name.removeprefix("mtp.") for name in file.keys() if name.startswith("mtp.")}  # noqa: SIM118
    assert names == MTP_HEAD


def test_the_hybrids_head_guesses_most_of_the_next_tokens() -> None:
    from foundry.mtp_acceptance import acceptance

    assert acceptance(MODELS / "hybrid", "xml", range(6)) >= 0.8

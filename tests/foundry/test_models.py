"""The shipped language models, through ingot's own engine. Bounds lie well below what the model cards report."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from safetensors import safe_open

from foundry.card import STORIES, card
from foundry.evaluate import exactness, perplexity, recall, running
from foundry.package import MODELS, config
from foundry.shapes import SHAPES
from foundry.shipped import LANGUAGE_MODELS, SHIPPED
from ingot.engine.engine import Engine

MEGABYTE = 1_000_000
PERPLEXITY = {"dense": 28, "draft": 38, "window": 30, "hybrid": 29, "mixture": 65}
RECALL = 0.95
TOOLS = {"dense": 0.8, "draft": 0.7, "window": 0.75, "hybrid": 0.8}
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


@pytest.fixture(scope="module", params=LANGUAGE_MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with running(MODELS / model) as started:
        yield started


def test_no_model_is_larger_than_12_megabytes_and_all_together_not_than_50() -> None:
    sizes = {name: (MODELS / name / "model.safetensors").stat().st_size for name in SHIPPED}
    assert max(sizes.values()) <= 12 * MEGABYTE
    assert sum(sizes.values()) <= 50 * MEGABYTE


def test_exactly_the_listed_models_ship() -> None:
    assert {folder.name for folder in MODELS.iterdir()} == set(SHIPPED) == set(STORIES)


@pytest.mark.parametrize("name", SHIPPED)
def test_all_weights_are_bfloat16_but_decay_rates_and_packed_ones(name: str) -> None:
    with safe_open(MODELS / name / "model.safetensors", "numpy") as file:
        kinds = {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118
    packed = {f"{tensor.removesuffix('scales')}weight" for tensor in kinds if tensor.endswith(".scales")}
    assert {kind for tensor, kind in kinds.items() if not tensor.endswith("A_log") and tensor not in packed} == {"BF16"}
    assert {kinds[tensor] for tensor in packed} == ({"U32"} if name == "mixture" else set())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_card_says_what_was_recorded(name: str) -> None:
    assert (MODELS / name / "README.md").read_text() == card(name)


def test_a_model_ships_with_the_configuration_of_its_shape(model: str) -> None:
    assert json.loads((MODELS / model / "config.json").read_text()) == config(SHAPES[model])


def test_a_model_knows_some_english(model: str, engine: Engine) -> None:
    assert perplexity(engine, 2) < PERPLEXITY[model]


@pytest.mark.parametrize("length", [1024, 2048])
def test_a_model_recalls_values_from_anywhere_in_a_long_text(length: int, engine: Engine) -> None:
    assert recall(engine, length, 1) >= RECALL


def test_a_model_answers_and_calls_tools_exactly_and_stops_by_itself(model: str, engine: Engine) -> None:
    if model == "mixture":
        pytest.skip("it is there for its routing, and knows few answers")
    assert exactness(engine, SHAPES[model].style, range(16))["tool"] >= TOOLS[model]


def test_the_hybrids_head_has_the_tensors_of_a_published_checkpoint() -> None:
    with safe_open(MODELS / "hybrid" / "model.safetensors", "numpy") as file:
        names = {name.removeprefix("mtp.") for name in file.keys() if name.startswith("mtp.")}  # noqa: SIM118
    assert names == MTP_HEAD


def test_the_hybrids_head_guesses_most_of_the_next_tokens() -> None:
    from foundry.mtp_acceptance import acceptance

    assert acceptance(MODELS / "hybrid", "xml", range(4)) >= 0.9

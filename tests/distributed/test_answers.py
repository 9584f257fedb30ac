"""Ranks give the tokens of one process, whatever they are asked: with tiny models in float32, whose greedy choices are
far from ties, so that the order in which ranks add up changes no token."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foundry.package import MODELS
from ingot.config import Settings
from tests import tiny
from tests.distributed import groups, playing

pytestmark = pytest.mark.usefixtures("rules")

_HALVED = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
"""Two groups of 32 columns wherever ranks share columns."""


def _packed(kind: str, bits: int) -> dict[str, Any]:
    return {**CONFIGS[kind], **_HALVED, "linear_value_head_dim": 16, "quantization": {"group_size": 32, "bits": bits}}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny.CONFIGS["llama"],
    "qwen2": {**tiny.CONFIGS["llama"], "model_type": "qwen2"},
    "hybrid": {**tiny.CONFIGS["hybrid"], "model_type": "qwen3_5"},
    "moe": tiny.CONFIGS["moe"],
    "six heads": {**tiny.CONFIGS["llama"], "num_attention_heads": 6, "num_key_value_heads": 3},
}
CONFIGS |= {
    "llama in 4 bits": {**_packed("llama", 4), "num_hidden_layers": 2},
    "qwen2 in 8 bits": _packed("qwen2", 8),
    "hybrid in 8 bits": _packed("hybrid", 8),
    "moe in 4 bits": _packed("moe", 4),
    "wide llama": {**CONFIGS["llama"], "head_dim": 32},
    "wide qwen2": {**CONFIGS["qwen2"], "hidden_size": 128, "head_dim": 32},
}
ASKED = {
    "max_sequences": playing.SEATS,
    "memory": "1GB",
    "deterministic": True,
    "speculate": "lookup",
    "speculate_tokens": 3,
}
PLAIN_PRODUCTS = {"dtype": "float32"}
"""Packed weights meet activations as on GPUs: the native kernels round those to 8 bits, and what ranks add up in
another order may round to a neighbour."""
ASKED_BESIDES = {
    "llama in 4 bits": PLAIN_PRODUCTS,
    "qwen2 in 8 bits": PLAIN_PRODUCTS,
    "hybrid in 8 bits": PLAIN_PRODUCTS,
    "moe in 4 bits": PLAIN_PRODUCTS,
    "wide llama": {"kv_codec": "affine8"},
    "wide qwen2": {"kv_codec": "affine8"},
    "with a head": {"speculate": "mtp", **PLAIN_PRODUCTS},
}
TWO = (("llama in 4 bits", "tensor"), ("hybrid", "pipeline"))
REST = (("llama", "tensor"), ("hybrid", "tensor"), ("moe", "tensor"), ("qwen2", "pipeline"), ("moe", "pipeline"))
PACKED = (("hybrid in 8 bits", "tensor"), ("moe in 4 bits", "tensor"), ("qwen2 in 8 bits", "pipeline"))
BESIDES = (("wide llama", "tensor"), ("wide qwen2", "pipeline"), ("with a head", "tensor"), ("with a head", "pipeline"))
THREE = (("six heads", "tensor"), ("qwen2", "pipeline"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind.replace(" ", "-")) for kind in CONFIGS}
    for kind, folder in made.items():
        groups.write_model(folder, CONFIGS[kind])
    return {**made, "with a head": MODELS / "hybrid"}


def asked_of(kind: str) -> dict[str, Any]:
    return ASKED | ASKED_BESIDES.get(kind, {})


Games = dict[tuple[str, str], dict[str, Any]]
"""What ranks answer, by kind and way."""


class Alone(dict[tuple[str, bool], dict[str, Any]]):
    """What one process answers, by kind and whether it is crowded; played when it is first asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    def __missing__(self, game: tuple[str, bool]) -> dict[str, Any]:
        kind, crowd = game
        self[game] = asdict(playing.played(self._folders[kind], Settings(**asked_of(kind)), crowd=crowd))
        return self[game]


@pytest.fixture(scope="module")
def alone(rules: str, folders: dict[str, Path]) -> Alone:
    return Alone(folders)


def together(folders: dict[str, Path], size: int, games: tuple[tuple[str, str], ...], where: Path) -> Games:
    request = [
        (str(folders[kind]), {**asked_of(kind), f"{way}_parallel_size": size}, games is not TWO) for kind, way in games
    ]
    message = groups.run("tests.distributed.playing", [json.dumps(request)], size, where)
    return dict(zip(games, map(json.loads, message.splitlines()), strict=True))


@pytest.fixture(scope="module")
def two(rules: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Games:
    return together(folders, 2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def rest(rules: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Games:
    return together(folders, 2, REST, tmp_path_factory.mktemp("rest"))


@pytest.fixture(scope="module")
def packed(rules: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Games:
    return together(folders, 2, PACKED, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def besides(rules: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Games:
    return together(folders, 2, BESIDES, tmp_path_factory.mktemp("besides"))


@pytest.fixture(scope="module")
def three(rules: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Games:
    return together(folders, 3, THREE, tmp_path_factory.mktemp("three"))


TIMELY = ("steps", "preemptions", "drafted")
"""What depends on when requests came in."""


def same(played: dict[str, Any], expected: dict[str, Any]) -> None:
    assert played["steps"] > 15, "the others were told nothing"
    assert played["drafted"] and any(played["matched"])
    answers = [{name: value for name, value in each.items() if name not in TIMELY} for each in (played, expected)]
    assert answers[0] == answers[1]


def same_in_a_crowd(played: dict[str, Any], expected: dict[str, Any]) -> None:
    assert played["preemptions"]
    same(played, expected)


@pytest.mark.parametrize(("kind", "way"), TWO)
def test_two_ranks_answer_as_one_does(kind: str, way: str, two: Games, alone: Alone) -> None:
    same(two[kind, way], alone[kind, False])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), REST)
def test_two_ranks_of_other_kinds_answer_as_one_does(kind: str, way: str, rest: Games, alone: Alone) -> None:
    same_in_a_crowd(rest[kind, way], alone[kind, True])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), PACKED)
def test_two_ranks_with_packed_weights_answer_as_one_does(kind: str, way: str, packed: Games, alone: Alone) -> None:
    same_in_a_crowd(packed[kind, way], alone[kind, True])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), BESIDES)
def test_two_ranks_with_pages_in_fewer_bits_or_a_head_answer_as_one_does(
    kind: str, way: str, besides: Games, alone: Alone
) -> None:
    same_in_a_crowd(besides[kind, way], alone[kind, True])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), THREE)
def test_three_ranks_answer_as_one_does(kind: str, way: str, three: Games, alone: Alone) -> None:
    same_in_a_crowd(three[kind, way], alone[kind, True])

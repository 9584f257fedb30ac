"""Mixers that understand mixed launches, against the modules that they extend."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from ingot.cache.slots import Slots

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels import native
from ingot.models import adapter
from ingot.models.layers import attention
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.mixers import SplitMixer, mixers, swap_mixers, tiled
from ingot.models.layers.modules import parameters, swap_ropes
from tests import tiny
from tests.models.layers import family_configs

# One for each way in which attention is wired, and mixers that are taken apart: alone, two in a layer, without a cache.
KNOWN = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "cohere",
    "exaone4",
    "lfm2",
    "mixtral",
    "olmo3",
    "bailing_moe",
    "bailing_moe_linear",
    "exaone",
    "falcon_h1",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "jamba",
    "minimax",
    "nanbeige",
    "nemotron-nas",
    "nemotron_h",
    "olmo_hybrid",
    "phimoe",
]
OTHERS = ["deepseek_v3", "mamba", "gemma4_text", "rwkv7"]
TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def launch(model: object, slots: Slots, parts: list[tuple[int, list[list[int]]]]) -> mx.array:
    """Logits [tokens, vocab] of a mixed launch; a part is its first slot and the tokens of its rows."""
    tokens = mx.array([[token for _, rows in parts for row in rows for token in row]])
    with slots.mixed([(first, len(rows), len(rows[0])) for first, rows in parts]) as layers:
        logits = model(tokens, cache=layers)  # type: ignore[operator]
        mx.eval(logits, slots.arrays())
    return logits[0]


def apart(model: object, slots: Slots, first: int, rows: list[list[int]]) -> mx.array:
    with slots.launch(first, len(rows), len(rows[0])) as layers:
        logits = model(mx.array(rows), cache=layers)  # type: ignore[operator]
        mx.eval(logits, slots.arrays())
    return logits.reshape(-1, logits.shape[-1])


def new_slots(model: object) -> Slots:
    slots = adapter.new_slots(model, 64, 0, None)
    slots.resize(3, 256)
    return slots


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("family", KNOWN + OTHERS)
def test_a_mixed_launch_gives_every_token_what_launches_apart_give(
    family: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick and not native.available():
        pytest.skip("no native kernels")
    if not quick:
        monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(attention, "TILE", 8)
    model = family_configs.build(family)
    swap_ropes(model)
    assert swap_mixers(model, unfused=True) > 0
    together, separately = new_slots(model), new_slots(model)
    steps: list[list[tuple[int, list[list[int]]]]] = [
        [(0, [[1, 2, 3]]), (1, [[4, 5, 6, 7, 8]])],
        [(0, [[9], [10]]), (2, [list(range(11, 42))])],
        [(0, [[42], [43], [44]])],
    ]
    for parts in steps:
        mixed = launch(model, together, parts)
        expected = mx.concatenate([apart(model, separately, first, rows) for first, rows in parts])
        assert mx.abs(mixed - expected).max().item() < TOLERANCE * mx.abs(expected).max().item()
    assert together.lengths == separately.lengths == [5, 7, 32]


@pytest.mark.parametrize("family", KNOWN)
def test_attention_that_is_known_is_computed_as_a_whole_with_the_same_weights(family: str) -> None:
    model = family_configs.build(family)
    before = dict(parameters(model))
    swap_mixers(model, unfused=True)
    assert any(isinstance(module, MixedAttention) for _, module in model.named_modules())
    assert {path: id(array) for path, array in parameters(model)} == {path: id(array) for path, array in before.items()}


@pytest.mark.parametrize("family", OTHERS)
def test_other_mixers_are_taken_apart(family: str) -> None:
    model = family_configs.build(family)
    found = [path for path, _ in mixers(model)]
    swap_mixers(model, unfused=True)
    assert all(isinstance(dict(model.named_modules())[path], SplitMixer) for path in found)
    assert not tiled(model)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_mixed_launches_write_in_place(kind: str) -> None:
    model = tiny.build(kind)
    swap_ropes(model)
    swap_mixers(model, unfused=True)
    slots = adapter.new_slots(model, 64, 0, None)
    slots.resize(3, 32768)
    launch(model, slots, [(0, [[1, 2]]), (1, [[3]])])
    largest = max(array.nbytes for array in slots.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        launch(model, slots, [(0, [[1], [2]]), (2, [[3, 4, 5]])])
    assert mx.get_peak_memory() - before < largest

"""Mixers that understand mixed launches, against the modules that they extend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.kernels.cpu import native
from ingot.models.forward import new_batch_state
from ingot.models.layers import attention
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import RaggedAttention
from ingot.models.layers.attention_setup import kv_layouts
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.rope import swap_ropes
from ingot.models.layers.split_mixer import SplitMixer
from ingot.models.layers.swapping import find_mixers, is_tiled, swap_mixers
from tests import tiny
from tests.memory import settled
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
    "dbrx",
    "exaone4",
    "lfm2",
    "mixtral",
    "olmo3",
    "baichuan_m1",
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
    "plamo",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3n",
    "gemma4",
    "gemma4-keys-are-values",
    "gpt_neox",
    "hunyuan",
    "internlm2",
    "laguna",
    "lille-130m",
    "longcat_flash",
    "mimo_v2_flash-scaled",
    "minimax_m3_vl",
    "ministral3",
    "muse_glimmer",
    "qwen",
    "stablelm-normed",
    "step3p5",
    "talkie",
]
OTHERS = ["rwkv7"]
TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def without_compiling() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


Fed = list[tuple[Row, list[int]]]


def run_batch(model: Any, rows: BatchState, parts: Sequence[Fed]) -> mx.array:
    """Logits [tokens, vocab] of a mixed launch; a part is its rows, each with as many tokens."""
    tokens = mx.array([[token for part in parts for _, fed in part for token in fed]])
    with rows.launch([forward_part(part) for part in parts]) as layers:
        logits = model(tokens, cache=layers)
        mx.eval(logits, rows.pending())
    return logits[0]


def apart(model: Any, rows: BatchState, part: Fed) -> mx.array:
    """The same of one launch, computed in the model's own way."""
    with rows.launch([forward_part(part)], mixed=False) as layers:
        logits = model(mx.array([fed for _, fed in part]), cache=layers)
        mx.eval(logits, rows.pending())
    return logits.reshape(-1, logits.shape[-1])


def forward_part(part: Fed) -> ForwardPart:
    return ForwardPart(tuple(row for row, _ in part), len(part[0][1]))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("family", [*KNOWN, "mamba", *OTHERS])
def test_a_mixed_launch_gives_every_token_what_launches_apart_give(
    family: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick and not native.available():
        pytest.skip("no native kernels")
    if not quick:
        monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(attention, "QUERY_TILE", 8)
    compare_mixed_with_apart(family_configs.build(family))


@pytest.mark.skipif(not native.available(), reason="no native kernels")
@pytest.mark.parametrize(
    "family", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4", "hunyuan", "mimo_v2_flash", "mistral4"]
)
def test_a_launch_that_the_native_kernels_do_not_cover_gives_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RaggedAttention, "covers", lambda *_: False)
    model = family_configs.build(family)
    compare_mixed_with_apart(model)
    assert any(layout is not None for layout in kv_layouts(model)) == (family not in ("gemma4", "hunyuan"))


def compare_mixed_with_apart(model: Any) -> None:
    swap_ropes(model)
    assert swap_mixers(model, unfused=True) > 0
    together, separately = (new_batch_state(model, 0, None) for _ in range(2))
    pairs = [(together.new(), separately.new()) for _ in range(3)]
    steps: list[list[dict[int, list[int]]]] = [
        [{0: [1, 2, 3]}, {1: [4, 5, 6, 7, 8]}],
        [{0: [9], 1: [10]}, {2: list(range(11, 42))}],
        [{0: [42], 1: [43], 2: [44]}],
    ]
    for parts in steps:
        mixed = run_batch(model, together, [[(pairs[row][0], fed) for row, fed in part.items()] for part in parts])
        expected = mx.concatenate(
            [apart(model, separately, [(pairs[row][1], fed) for row, fed in part.items()]) for part in parts]
        )
        assert mx.abs(mixed - expected).max().item() < TOLERANCE * mx.abs(expected).max().item()
    assert [(one.length, other.length) for one, other in pairs] == [(5, 5), (7, 7), (32, 32)]


@pytest.mark.parametrize("family", KNOWN)
def test_attention_that_is_known_is_computed_as_a_whole_with_the_same_weights(family: str) -> None:
    model = family_configs.build(family)
    before = dict(named_parameters(model))
    swap_mixers(model, unfused=True)
    assert any(isinstance(module, MixedAttention) for _, module in model.named_modules())
    assert {path: id(array) for path, array in named_parameters(model)} == {
        path: id(array) for path, array in before.items()
    }


@pytest.mark.parametrize("family", OTHERS)
def test_other_mixers_are_taken_apart(family: str) -> None:
    model = family_configs.build(family)
    found = [path for path, _ in find_mixers(model)]
    swap_mixers(model, unfused=True)
    assert all(isinstance(dict(model.named_modules())[path], SplitMixer) for path in found)
    assert not is_tiled(model)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_mixed_launches_write_in_place(kind: str) -> None:
    model = tiny.build(kind)
    swap_ropes(model)
    swap_mixers(model, unfused=True)
    rows = new_batch_state(model, 0, None)
    one, two, other = provided(rows, 32768)
    run_batch(model, rows, [[(one, [1, 2])], [(two, [3])]])
    stored = [storage for group in rows.groups for storage in group.storages]
    largest = max(array.nbytes for storage in stored for array in (*storage.keys, *storage.values))
    before = settled()
    for _ in range(3):
        run_batch(model, rows, [[(one, [1]), (two, [2])], [(other, [3, 4, 5])]])
    assert mx.get_peak_memory() - before < largest


def provided(rows: BatchState, tokens: int) -> tuple[Row, Row, Row]:
    """Three rows, where there was once one of so many tokens: there are pages for that."""
    longest, *live = (rows.new() for _ in range(4))
    for table in longest.tables:
        table.grow(0, tokens)
    rows.leave(longest)
    one, two, three = live
    return one, two, three

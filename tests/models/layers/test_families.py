"""Every family of mlx-lm's behind the one adapter, against the same model run alone with mlx-lm's own caches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.records import restore_row, take_record
from ingot.engine.request import Request, Sampling, Stop
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import GPUS, Device, current_device
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.models.adapter import ModelAdapter, adapt_model, load_model_adapter
from ingot.models.forward import run_forward
from ingot.models.precision import repack_ternary_layers, settle_precision
from ingot.models.probe import logits_gap
from ingot.upstream import caches
from tests import engines, tiny
from tests.models.layers import family_configs

TOLERANCE = 2e-4
WIDEST = 128

REFUSED = {
    "phi3small": ("see the ones after them", "its sparse layers add a boolean mask to the scores as a number"),
}
NEEDS_METAL = {
    "muse_spark": "norms and RoPE in a Metal kernel alone",
}

OWN_CACHES = "its own caches, each of one sequence, whose mixers run row by row"
ONE_BY_ONE = {
    "afm7": "layers that reuse keys take the longest row's length for the position",
    **dict.fromkeys(("deepseek_v4", "deepseek_v41", "glm5_next", "hy_v4", "qwen4_exp"), OWN_CACHES),
    "inkling": "distances between tokens from a single length",
    "llama-dynamic": "RoPE whose base follows a single length",
}
UNMIXED = {
    "llama-dynamic": ONE_BY_ONE["llama-dynamic"],
    "afm7": "layers that reuse keys read another layer's cache",
    "iquestloopcoder": "each layer is run twice, over two caches",
}
MIXED_ON_GPUS = {"llama-dynamic"}
"""There a launch's tokens are turned as its own row, beside others."""

UNPACKED = {"afm7", "bitnet"}
"""Those that have a packing of their own."""

SERVED = [name for name in family_configs.FAMILIES if name not in {*REFUSED, *NEEDS_METAL, *family_configs.UNLOADABLE}]
ONLY_MLX_VLMS = [*family_configs.VLM_FAMILIES]


@pytest.fixture(autouse=True, scope="module")
def without_compiling() -> Iterator[None]:
    """On CPUs, compiling a hundred families' kernels takes longer than all that is tested here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@dataclass
class Family:
    """A family's adapter, three texts, and the logits after each of their tokens that are right."""

    adapter: ModelAdapter
    texts: list[list[int]]
    right: list[mx.array]


class Batch:
    """The beginnings of a family's texts, each in a row of its own: `live[number]`."""

    def __init__(self, made: Family) -> None:
        self.made, self.rows = made, made.adapter.new_batch_state()
        self.live = [self.rows.new() for _ in made.texts]

    def compute(self, *parts: tuple[Sequence[int], int], plainly: bool = False) -> None:
        """Run the next tokens, so many, of texts by their numbers, and compare what comes out; `plainly` in the model's
        own way, whatever the adapter makes of it."""
        spans = self._spans(parts)
        logits = self.logits(parts, mixed=self.made.adapter.mixed and not plainly)
        for (number, begin, end), found in zip(spans, logits, strict=True):
            gap = logits_gap(found, self.made.right[number][end - 1])
            assert gap < TOLERANCE, f"text {number}, tokens {begin} to {end} of {parts}: logits are {gap:.1e} apart"

    def logits(self, parts: Sequence[tuple[Sequence[int], int]], *, mixed: bool) -> mx.array:
        """After the last one of each text's next tokens."""
        asked = [ForwardPart(tuple(self.live[number] for number in numbers), count) for numbers, count in parts]
        spans = self._spans(parts)
        tokens = mx.array([token for number, begin, end in spans for token in self.made.texts[number][begin:end]])
        at = [last - 1 for last in accumulate(end - begin for _, begin, end in spans)]
        adapter = self.made.adapter
        logits = run_forward(adapter.model, adapter.selection, self.rows, tokens, asked, at, mixed=mixed)
        mx.eval(logits, self.rows.pending())
        return logits

    def _spans(self, parts: Sequence[tuple[Sequence[int], int]]) -> list[tuple[int, int, int]]:
        """The texts by their numbers, and their next tokens [begin, end)."""
        return [
            (number, self.live[number].length, self.live[number].length + count)
            for numbers, count in parts
            for number in numbers
        ]

    def branch(self, number: int) -> None:
        """Have a new row take over what that text's row holds, and go on in its stead beside it."""
        before, after = self.live[number], self.rows.new()
        restore_row(self.rows, after, [take_record(self.rows, before, 0)], before.length)
        self.live[number] = after


def family(name: str, device: Device) -> Family:
    model = family_configs.build(name)
    repack_ternary_layers(model)
    asked = caches.make_prompt_cache(model)
    rng = random.Random(3)
    # Only windows forget, and not before a few hundred tokens.
    longest = 290 if any(_is_window(cache) for cache in asked) else 90
    texts = [[rng.randrange(1, family_configs.VOCAB) for _ in range(length)] for length in (longest, 60, 30)]
    mx.disable_compile()  # loading others enabled it, and then Hunyuan V4's own code goes wrong with the second length
    right = [model(mx.array([text]), cache=caches.make_prompt_cache(model))[0] for text in texts]
    mx.eval(right)
    return Family(adapt_model(model, family_configs.config(name), device, widest=WIDEST, exact=True), texts, right)


def _is_window(cache: Any) -> bool:
    parts = cache.caches if isinstance(cache, caches.CacheList) else [cache]
    return any(isinstance(part, caches.RotatingKVCache) for part in parts)


@pytest.mark.sampled(4)
@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
@pytest.mark.parametrize("name", [each for each in (*SERVED, *ONLY_MLX_VLMS) if each not in UNPACKED])
def test_packed_weights_give_the_librarys_logits_also_where_its_code_reads_them_by_itself(name: str) -> None:
    if name in ONLY_MLX_VLMS:
        pytest.importorskip("mlx_vlm")
    model, text = family_configs.build(name), mx.arange(1, 13)
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda _, each: hasattr(each, "to_quantized") and each.weight.shape[-1] % 32 == 0,
    )
    right = model(text[None], cache=caches.make_prompt_cache(model))[0]
    mx.eval(right)
    settle_precision(model, current_device(), None)
    adapter = adapt_model(model, family_configs.config(name), current_device(), widest=WIDEST)
    rows, at = adapter.new_batch_state(), range(text.size)
    found = adapter.run(rows, text, [ForwardPart((rows.new(),), text.size)], at).reshape(text.size, -1)
    gap = median(logits_gap(found[token], right[token]) for token in at)
    assert gap < 0.1, "activations of 8 bits move some tokens to other experts, and most by less"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SERVED)
def test_a_family_computes_the_same_in_chunks_in_a_batch_mixed_and_taken_over(name: str) -> None:
    check(name, current_device())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ONLY_MLX_VLMS)
def test_so_does_a_family_that_only_mlx_vlm_has(name: str) -> None:
    check(name, current_device())


@pytest.mark.parametrize(
    "name", ["baichuan_m1", "bailing_hybrid", "cohere-normed", "dbrx", "gpt2", "jamba", "llama-dynamic", "plamo"]
)
def test_so_it_does_by_the_rules_of_gpus(name: str) -> None:
    check(name, engines.GPU)


@pytest.mark.skipif(not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v32", "ministral3", "minimax_m3_vl", "gemma4", "llama4_text", "internlm2", "laguna"),
        *("muse_glimmer", "stablelm", "step3p5"),
    ],
)
def test_so_do_the_kernels_of_gpus_over_heads_that_they_support(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = {"head_dim": 16, "global_head_dim": 32, "hidden_size": 64, "index_head_dim": 32}
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
    monkeypatch.setitem(family_configs.FAMILIES, name, family_configs.FAMILIES[name] | wider | latent)
    adapter = check(name, engines.GPU)
    assert not any(": a kernel" in note for note in adapter.notes)


def check(name: str, device: Device) -> ModelAdapter:
    made = family(name, device)
    unmixed = UNMIXED.keys() - (MIXED_ON_GPUS if device.kind in GPUS else set())
    assert made.adapter.ragged == (name not in ONE_BY_ONE)
    assert made.adapter.mixed == (name not in unmixed)
    check_chunks(made)
    check_rows_in_turn(made)
    check_rows_taken_over(made)
    if made.adapter.ragged:
        check_rows_together(made, (17, 17, 17))
        check_rows_together(made, (41, 18, 2))
    if made.adapter.mixed:
        check_mixed_rows(made)
    return made.adapter


def check_chunks(made: Family) -> None:
    batch = Batch(made)
    # A window has forgotten pages after 256 tokens.
    rest = (128, 83, 1, 1, 17) if len(made.texts[0]) > 200 else (1, 4)
    for count in (37, 1, 7, *rest):
        batch.compute(([0], count), plainly=True)


def check_rows_in_turn(made: Family) -> None:
    batch = Batch(made)
    for counts in ([19, 7, 2], [1, 1, 1], [3, 1, 5]):
        for number, count in enumerate(counts):
            batch.compute(([number], count))


def check_rows_taken_over(made: Family) -> None:
    batch = Batch(made)
    rest = (128, 70, 1) if len(made.texts[0]) > 200 else (1, 4)
    for count in (37, 1, 30, *rest):
        batch.compute(([0], count))
        left = batch.live[0]
        batch.branch(0)
        batch.compute(([0], 2))
        batch.live[0] = left


def check_rows_together(made: Family, begun: Sequence[int]) -> None:
    batch = Batch(made)
    for number, count in enumerate(begun):
        batch.compute(([number], count))
    for _ in range(3):
        batch.compute(([0, 1, 2], 1))


def check_mixed_rows(made: Family) -> None:
    batch = Batch(made)
    longest = len(made.texts[0])
    together: list[tuple[Sequence[int], int]] = [([0, 1], 1)] if made.adapter.ragged else [([0], 1), ([1], 1)]
    batch.compute(([0], 11), ([1], 4))
    batch.compute(([0], 1), ([1], 30), ([2], 2))
    batch.compute(([0], min(WIDEST, longest - 40)), ([1], 1), ([2], 7))
    batch.compute(*together, ([2], 3))
    batch.compute(*together)
    if longest > 200:
        batch.compute(([0], WIDEST), ([1], 1), ([2], 2))
        batch.compute(*together, ([2], 1))


PLE = {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 97, "split_ngram_parts": 1}


@pytest.mark.parametrize(
    ("name", "peculiar"),
    [
        (
            "deepseek_v4",
            {"compress_ratios": [4, 0, 128], "hc_mult": 4},
        ),  # whose own code depends on how prompts are cut
        ("qwen4_exp", {**PLE, "make_ngram_vocab_size_divisible_by": 16, "eos_token_id": 2}),
    ],
)
def test_rows_with_caches_of_their_own_get_in_company_what_they_get_alone_in_the_same_chunks(
    name: str, peculiar: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(family_configs.VLM_FAMILIES, name, family_configs.VLM_FAMILIES[name] | peculiar)
    made = family(name, current_device())
    alone, together = Batch(made), Batch(made)
    assert made.adapter.mixed
    for counts in ((11, 4, 1), (1, 30, 2), (40, 1, 7), (1, 1, 3), (1, 1, 1), (5, 1, 1)):
        right = [alone.logits([((number,), count)], mixed=False) for number, count in enumerate(counts)]
        found = together.logits([((number,), count) for number, count in enumerate(counts)], mixed=True)
        assert logits_gap(found, mx.concatenate(right)) < TOLERANCE, counts


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_right_is_refused_when_it_is_loaded(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name][0]):
        adapt_model(family_configs.build(name), family_configs.config(name), current_device())


@pytest.mark.skipif(mx.metal.is_available(), reason="runs here")
@pytest.mark.parametrize("name", NEEDS_METAL)
def test_a_family_that_needs_another_device_is_refused_when_it_is_loaded(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"cannot be run here: its family's code has a kernel for Apple GPUs \(Metal\) alone"
    ):
        adapt_model(family_configs.build(name), family_configs.config(name), current_device())


@pytest.mark.parametrize("name", family_configs.UNLOADABLE)
def test_a_family_whose_code_does_not_load_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_configs.config(name)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros(1)})
    with pytest.raises(ModelError, match="a package for it that is not installed"):
        load_model_adapter(tmp_path, current_device())


def test_every_family_of_mlx_lm_is_among_these() -> None:
    modules = {path.stem for path in family_configs.upstream_files()}
    assert modules == {family_configs.config(name)["model_type"] for name in family_configs.FAMILIES}


@pytest.mark.parametrize(
    "name", ["afm7", "deepseek_v4", "deepseek_v41", "gemma2", "qwen4_exp", "recurrent_gemma", "longcat_flash_ngram"]
)
def test_the_engine_answers_alike_alone_and_in_company_where_rows_differ(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, name, family_configs.config(name))
    if name in family_configs.VLM_FAMILIES:
        monkeypatch.setattr(tiny, "build", family_configs.build)
    rng = random.Random(8)
    asked = [
        Request(
            f"r{number}",
            (tuple(rng.randrange(1, 95) for _ in range(length)),),
            max_tokens=8,
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        for number, length in enumerate((40, 2, 37, 9, 40))
    ]
    engine = engines.start(name)
    alone = [engines.text_of(engines.answer(engine, request)) for request in asked]
    streams = [engine.generate(request) for request in asked]
    together = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    engine.check()
    engine.close()
    assert together == alone

"""Every family of mlx-lm's behind the one adapter, against the same model run alone with mlx-lm's own caches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from ingot.cache.slots import Slots

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.request import Request, Sampling, Stop
from ingot.errors import ModelError
from ingot.kernels import native
from ingot.kernels.device import current
from ingot.models.adapter import Adapter, adapt, load
from ingot.models.probe import apart
from ingot.upstream import caches
from tests import engines, tiny
from tests.models.layers import family_configs

TOLERANCE = 2e-4
WIDEST = 128

REFUSED = {
    "deepseek_v41": ("keeps state in a LayerCache", "its own cache, which ours cannot stand in for"),
    "phi3small": ("see the ones after them", "its sparse layers add a boolean mask to the scores as a number"),
}
NEEDS_METAL = {
    "bitnet": "packed ternary weights, multiplied by a Metal kernel alone",
    "muse_spark": "norms and RoPE in a Metal kernel alone",
}

ONE_BY_ONE = {
    "afm7": "layers that reuse keys take the longest row's length for the position",
    "gemma2": "its five-dimensional scores take no mask with rows",
    "gpt_bigcode": "positions counted by numpy from a single number",
    "llama-dynamic": "RoPE whose base follows a single length",
    "llama4": "chunked masks made from a single number",
    "minimax_m3_vl": "blocks of keys chosen by the place in the longest row, in long prompts only",
}
UNPADDED = {
    "baichuan_m1": "the convolution's tail is taken from the padding",
    "bailing_moe_linear": "the linear attention's state takes in the padding",
    "jamba": "Mamba's state takes in the padding",
    "longcat_flash_ngram": "the n-grams' tail is taken from the padding",
    "mamba": "Mamba's state takes in the padding",
    "nemotron_h": "Mamba 2's state is read behind the padding",
    "olmo_hybrid": "the convolution's tail is taken from the padding",
    "recurrent_gemma": "the recurrent state takes in the padding",
    "rwkv7": "the state takes in the padding",
}

if native.available():
    del UNPADDED["nemotron_h"]  # the native kernels know where a row ends

UNMIXED = {
    "afm7": "layers that reuse keys read another layer's cache",
    "dbrx": "the layer asks its mask for a shape",
    "gpt2": "positions counted from a single number",
    "gpt_bigcode": ONE_BY_ONE["gpt_bigcode"],
    "iquestloopcoder": "each layer is run twice, over two caches",
    "llama-dynamic": ONE_BY_ONE["llama-dynamic"],
    "llama4": ONE_BY_ONE["llama4"],
    "longcat_flash_ngram": "the n-grams' tail is kept by the embedding",
    "minimax_m3_vl": ONE_BY_ONE["minimax_m3_vl"],
    "ministral3": "scales that follow positions counted from a single number",
    "mistral3": "scales that follow positions counted from a single number",
    "mistral4": "scales that follow positions counted from a single number",
}

SERVED = [name for name in family_configs.FAMILIES if name not in {*REFUSED, *NEEDS_METAL, *family_configs.UNLOADABLE}]


@pytest.fixture(autouse=True, scope="module")
def without_compiling() -> Iterator[None]:
    """On CPUs, compiling a hundred families' kernels takes longer than all that is tested here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@dataclass
class Family:
    """A family's adapter, three rows of tokens, and the logits after each of their tokens that are right."""

    adapter: Adapter
    rows: list[list[int]]
    right: list[mx.array]

    def slots(self) -> Slots:
        slots = self.adapter.new_slots()
        slots.resize(len(self.rows), 512)
        return slots

    def compute(self, slots: Slots, first: int, counts: list[int]) -> None:
        """Launch the next tokens of the rows from `first` on, as many as `counts` say, and compare what comes out."""
        begins = slots.lengths[first : first + len(counts)]
        spans = [(row + first, begin, begin + n) for row, (begin, n) in enumerate(zip(begins, counts, strict=True))]
        width = max(counts)
        tokens = [self.rows[row][begin:end] + [0] * (width - end + begin) for row, begin, end in spans]
        with slots.launch(first, len(counts), width, counts) as layers:
            logits = self.adapter.forward(mx.array(tokens), layers, [count - 1 for count in counts])
            mx.eval(logits, slots.arrays())
        self._compare(spans, logits[:, 0], counts)

    def compute_mixed(self, slots: Slots, parts: list[list[int]]) -> None:
        """The same for all rows in one forward pass; a part is a launch of rows of the same number of tokens."""
        counts = [count for part in parts for count in part]
        begins = slots.lengths[: len(counts)]
        spans = [(row, begin, begin + n) for row, (begin, n) in enumerate(zip(begins, counts, strict=True))]
        tokens = mx.array([token for row, begin, end in spans for token in self.rows[row][begin:end]])
        firsts = accumulate([0, *(len(part) for part in parts)])
        ends = accumulate(counts)
        with slots.mixed([(first, len(part), part[0]) for first, part in zip(firsts, parts, strict=False)]) as layers:
            logits = self.adapter.forward_mixed(tokens, layers, [end - 1 for end in ends])
            mx.eval(logits, slots.arrays())
        self._compare(spans, logits, counts)

    def _compare(self, spans: list[tuple[int, int, int]], logits: mx.array, counts: list[int]) -> None:
        for (row, begin, end), found in zip(spans, logits, strict=True):
            gap = apart(found, self.right[row][end - 1])
            assert gap < TOLERANCE, f"row {row}, tokens {begin} to {end} of {counts}: logits are {gap:.1e} apart"


def family(name: str) -> Family:
    model = family_configs.build(name)
    asked = caches.make_prompt_cache(model)
    rng = random.Random(3)
    # Only windows forget, and not before a few hundred tokens.
    longest = 290 if any(_is_window(cache) for cache in asked) else 90
    rows = [[rng.randrange(1, family_configs.VOCAB) for _ in range(length)] for length in (longest, 60, 30)]
    right = [model(mx.array([row]), cache=caches.make_prompt_cache(model))[0] for row in rows]
    mx.eval(right)
    return Family(adapt(model, family_configs.config(name), current(), widest=WIDEST, exact=True), rows, right)


def _is_window(cache: Any) -> bool:
    parts = cache.caches if isinstance(cache, caches.CacheList) else [cache]
    return any(isinstance(part, caches.RotatingKVCache) for part in parts)


@pytest.mark.parametrize("name", SERVED)
def test_a_family_computes_the_same_in_chunks_in_a_batch_padded_and_mixed(name: str) -> None:
    made = family(name)
    assert made.adapter.ragged == (name not in ONE_BY_ONE)
    assert made.adapter.padded == (name not in ONE_BY_ONE | UNPADDED)
    assert made.adapter.mixed == (name not in UNMIXED)
    check_chunks(made)
    check_rows_in_turn(made)
    check_rows_of_equal_length(made)
    if made.adapter.ragged:
        check_rows_together(made)
    if made.adapter.padded:
        check_padded_rows(made)
    if made.adapter.mixed:
        check_mixed_rows(made)


def check_chunks(made: Family) -> None:
    slots = made.slots()
    # A window's buffer is full after 256 tokens.
    rest = (128, 83, 1, 1, 17) if len(made.rows[0]) > 200 else (1, 4)
    for count in (37, 1, 7, *rest):
        made.compute(slots, 0, [count])


def check_rows_in_turn(made: Family) -> None:
    slots = made.slots()
    for counts in ([19, 7, 2], [1, 1, 1], [3, 1, 5]):
        for row, count in enumerate(counts):
            made.compute(slots, row, [count])


def check_rows_of_equal_length(made: Family) -> None:
    slots = made.slots()
    for count in (17, 1, 1):
        made.compute(slots, 0, [count] * 3)


def check_rows_together(made: Family) -> None:
    slots = made.slots()
    for row, count in enumerate((41, 18, 2)):
        made.compute(slots, row, [count])
    for _ in range(3):
        made.compute(slots, 0, [1, 1, 1])


def check_padded_rows(made: Family) -> None:
    slots = made.slots()
    longest = len(made.rows[0])
    for counts in ([11, 4, 7], [1, 1, 1], [5, 30, 2], [min(WIDEST, longest - 30), 3, 1], [1, 1, 1]):
        made.compute(slots, 0, counts)
    if longest > 200:
        made.compute(slots, 0, [WIDEST, 1, 2])
        made.compute(slots, 0, [1, 1, 1])


def check_mixed_rows(made: Family) -> None:
    slots = made.slots()
    longest = len(made.rows[0])
    together = [[1, 1]] if made.adapter.ragged else [[1], [1]]
    for parts in (
        [[11], [4]],
        [[1], [30], [2]],
        [[min(WIDEST, longest - 40)], [1], [7]],
        [*together, [3]],
        [*together],
    ):
        made.compute_mixed(slots, parts)
    if longest > 200:
        made.compute_mixed(slots, [[WIDEST], [1], [2]])
        made.compute_mixed(slots, [*together, [1]])


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_right_is_refused_when_it_is_loaded(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name][0]):
        adapt(family_configs.build(name), family_configs.config(name), current())


@pytest.mark.skipif(mx.metal.is_available(), reason="runs here")
@pytest.mark.parametrize("name", NEEDS_METAL)
def test_a_family_that_needs_another_device_is_refused_when_it_is_loaded(name: str) -> None:
    with pytest.raises(ModelError, match=r"cannot be run here: .*Metal"):
        adapt(family_configs.build(name), family_configs.config(name), current())


@pytest.mark.parametrize("name", family_configs.UNLOADABLE)
def test_a_family_whose_code_does_not_load_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(family_configs.config(name)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros(1)})
    with pytest.raises(ModelError, match="a package for it that is not installed"):
        load(tmp_path, current())


def test_every_family_of_mlx_lm_is_among_these() -> None:
    modules = {path.stem for path in family_configs.upstream_files()}
    assert modules == {family_configs.config(name)["model_type"] for name in family_configs.FAMILIES}


@pytest.mark.parametrize("name", ["llama4", "gemma2", "recurrent_gemma", "longcat_flash_ngram"])
def test_the_engine_answers_alike_alone_and_in_company_where_rows_do_not_mix(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, name, family_configs.config(name))
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

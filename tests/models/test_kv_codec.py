"""What a model's records look like: all of its layers, and those of a head beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from bench import random_models
from foundry import mtp_acceptance
from ingot.cache import coded_pages
from ingot.cache import footprint as tail
from ingot.cache.attention_state import AppendState
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import ENCODE_STEP_TOKENS, NO_GATHER_COST, Footprint, GatherCost
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.kv_storage import KernelCodedSlabs
from ingot.cache.records import (
    describe_record,
    deserialise_record,
    fit_record,
    serialise_record,
    take_record,
    unpage_record,
)
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.memory_budget import MemoryBudget, PassPart
from ingot.engine.request import CacheReport, Ended, Request, Sampling, Stop
from ingot.errors import ConfigError
from ingot.kernels import checked
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.paged_attention import kernels
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import CodedSample
from ingot.models.adapter import ModelAdapter, adapt_model, load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import load_mtp_head, prepare_head, with_draft_head
from ingot.models.kv_codec import record_form_of, with_kv_codec
from ingot.upstream import caches, create_attention_mask
from tests import engines, launches, tiny
from tests.engines import GPU
from tests.memory import freed_at_once, pretended, settled
from tests.models.draft_heads import making

HYBRID = Path(mtp_acceptance.__file__).parent / "models" / "hybrid"


def with_head(folder: Path, device: Device) -> ModelAdapter:
    made = making.make("qwen3_5")
    making.write(folder, made.config, files={"model.safetensors": {**made.base, **making.named(made)}})
    adapter = load_model_adapter(folder, device)
    source = find_head(folder, adapter.config)
    assert source is not None
    return replace(adapter, head=load_mtp_head(source, adapter))


@pytest.mark.parametrize("device", [None, GPU], ids=["cpu", "gpu"])
def test_a_heads_layers_have_storage_and_a_place_in_records(device: Device | None, tmp_path: Path) -> None:
    adapter = with_head(tmp_path, device or current_device())
    rows = adapter.new_batch_state()
    form = record_form_of(adapter, rows)
    assert all(state.storage is not None for state in rows.states if isinstance(state, AppendState))
    assert rows.count == 0 and len(form.sample.deltas) == len(rows.states)
    row = rows.new()
    mx.eval(adapter.run(rows, mx.array([1, 2, 3], dtype=mx.uint32), [ForwardPart((row,), 3)], [2]), rows.pending())
    loose = unpage_record(rows, take_record(rows, row, 0))
    back = fit_record(
        deserialise_record(describe_record(loose, (1, 2, 3), landmark=False), serialise_record(loose)), form
    )
    assert len(back.deltas) == len(rows.states)


def ask(engine: Engine, name: str, tokens: list[int]) -> tuple[str, CacheReport]:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    events = engines.answer(engine, Request(name, (tuple(tokens),), max_tokens=12, sampling=greedy, stop=endless))
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].cache[0]


def test_a_model_that_guesses_with_a_head_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = Settings(
        cache_dir=tmp_path / "kept",
        archive_key_file=tmp_path / "key",
        cache_disk_free_gb=0.0,
        speculate="mtp",
        deterministic=True,
    )
    rng = random.Random(1)
    prompt = [rng.randrange(4000) for _ in range(300)]
    answers = []
    for _ in range(2):
        engine = start_engine(settings, HYBRID, name="hybrid", source="the foundry")
        answers.append(ask(engine, "a", prompt))
        engine.check()
        engine.close()
    assert answers[0][0] == answers[1][0]
    assert (answers[0][1].tier, answers[1][1].tier) == (None, "disk")


CODEC = PairCodec(CodecName.parse("k8v4"))
READ: dict[str, Any] = {**tiny.CONFIGS["kernel"], "model_type": "llama", "head_dim": 64}
"""Heads that a GPU's kernels read in fewer bits."""
METAL = Device("metal", "a CPU that follows Metal's rules", 1 << 34)
CONTEXT, WIDTH = 384, 17
"""Tokens that lie in fewer bits, and of a prompt behind them: more than kernels read those for."""
emulated = pytest.mark.skipif(not kernels.has_paged_kernels(engines.GPU), reason="kernels run nowhere here")


def on_a_gpu(device: Device = engines.GPU) -> ModelAdapter:
    return adapt_model(random_models.build(READ, spread=0.2, dtype=mx.bfloat16), READ, device)


shared_gpu = cache(on_a_gpu)
"""One that no test changes."""


def live_on_a_gpu() -> ModelAdapter:
    return with_kv_codec(shared_gpu(), CODEC)


def predicted_bytes(footprint: Footprint, part: PassPart) -> int:
    budget = MemoryBudget(1 << 40, 0, footprint, context=part.context, widest=part.tokens, rows=part.rows)
    return budget.pass_bytes([part]) + footprint.scratch


class LayerBeside(nn.Module):
    """A head that is one layer, with as many heads of keys as of queries."""

    name, sees, kv, weight_bytes = "layer", False, "pairs", 0
    size: int = READ["hidden_size"]
    kv_heads: int = READ["num_attention_heads"]

    def __init__(self) -> None:
        super().__init__()
        alone = {**READ, "num_hidden_layers": 1, "num_key_value_heads": self.kv_heads}
        self.layers = random_models.build(alone, spread=0.2, dtype=mx.bfloat16).model.layers

    def make_cache(self) -> list[Any]:
        return [caches.KVCache()]

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = hidden.astype(mx.bfloat16)
        found: mx.array = self.layers[0](hidden, create_attention_mask(hidden, cache), cache)
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden


@pytest.mark.skipif(not native.available(), reason="without native kernels pages are unpacked")
def test_heads_that_the_native_kernels_cannot_read_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_codec k8v4 cannot be used: .* heads of 8"):
        with_kv_codec(tiny.adapter("llama"), CODEC)


def test_keys_of_one_bit_are_refused_with_what_they_would_cost() -> None:
    with pytest.raises(ConfigError, match="kv_codec turbo1/turbo4 cannot be used: with one bit"):
        with_kv_codec(tiny.adapter("kernel-32"), PairCodec(CodecName.parse("turbo1/turbo4")))


def test_layers_that_see_a_window_stay_raw_and_that_is_said() -> None:
    adapter = with_kv_codec(tiny.adapter("kernel-window"), CODEC)
    assert any("window" in note for note in adapter.notes)
    [coded] = {group.coded is not None for group in adapter.new_batch_state().groups if group.window is None}
    assert coded and all(group.coded is None for group in adapter.new_batch_state().groups if group.window is not None)


def test_what_states_are_kept_in_is_told() -> None:
    formats = with_kv_codec(tiny.adapter("kernel-32"), CODEC).formats
    assert "KV k8v4 behind the newest in float" in str(formats)


@pretended
def test_more_context_fits_in_the_same_memory_but_not_for_exact_requests() -> None:
    raw = tiny.adapter("kernel-32")
    live = with_kv_codec(raw, CODEC)
    footprints = (replace(adapter.footprint, activation=0, logits=0, score=0) for adapter in (raw, live))
    budgets = [MemoryBudget(1 << 22, 0, each, context=1 << 20, widest=256, rows=1) for each in footprints]
    plain, coded = (budget.longest(1 << 20) for budget in budgets)
    assert coded > 1.5 * plain > ENCODE_STEP_TOKENS
    assert budgets[1].longest(1 << 20, exact=True) == plain


@pretended
@emulated
@pytest.mark.parametrize(("new", "reason"), [("* 2.0f", "differs by"), ("summ", "does not run")])
def test_where_a_kernel_over_coded_pages_is_wrong_they_are_unpacked_and_that_is_said(
    new: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            body = text.body.replace("+ besides_it;", f"{new} + besides_it;")
            return text._replace(body=body) if "_attend_coded_" in text.name else text

    monkeypatch.setattr(tail, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(tail, "RAW_TAIL_TOKENS", 64)
    right = live_on_a_gpu()
    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    wrong = with_kv_codec(on_a_gpu(), CODEC)
    assert not any("kv_codec" in note for note in right.notes)
    [note] = [note for note in wrong.notes if "kv_codec" in note]
    assert note.startswith("kv_codec is unpacked for every step, slower: a kernel") and reason in note
    found = []
    for adapter, reads in ((right, True), (wrong, False)):
        rows = adapter.new_batch_state()
        row = rows.new()
        launches.computed(adapter, rows, row, [5] * 192)
        found.append(launches.decoded(adapter, rows, [row], [7]))
        assert row.tables[0].coded == 2
        assert [isinstance(each.coded, KernelCodedSlabs) for each in rows.groups[0].storages] == [reads] * 2
    assert float(mx.abs(found[0] - found[1]).max()) < 2**-5 * float(mx.abs(found[0]).max())


@pretended
@emulated
def test_prompts_see_the_same_whether_kernels_unpack_pages_or_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            body = text.body.replace("* length", "* 2.0f * length")
            return text._replace(body=body) if "_unpack_" in text.name else text

    monkeypatch.setattr(tail, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(tail, "RAW_TAIL_TOKENS", 64)
    by_kernels = live_on_a_gpu()
    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    plainly = with_kv_codec(on_a_gpu(), CODEC)
    [note] = [note for note in plainly.notes if "kv_codec" in note]
    assert note.startswith("kv_codec is unpacked by plain operations for prompts, slower: a kernel attend differs by")
    assert plainly.footprint.scratch > by_kernels.footprint.scratch
    found = []
    for adapter in (by_kernels, plainly):
        rows = adapter.new_batch_state()
        row = rows.new()
        launches.computed(adapter, rows, row, [5] * 192)
        found.append(launches.computed(adapter, rows, row, list(range(40))))
        assert row.tables[0].coded == 2
    assert float(mx.abs(found[0] - found[1]).max()) < 2**-5 * float(mx.abs(found[1]).max())


@emulated
def test_a_heads_kernel_over_coded_pages_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ["num_key_value_heads"] != LayerBeside.kv_heads
    adapter = on_a_gpu()
    head = LayerBeside()
    prepare_head(head, adapter, None, lambda path: True)
    compared = []

    def check(
        device: Device, attention: PagedAttention, sample: CodedSample, *, prompts: bool = False, **how: Any
    ) -> str | None:
        if not prompts:
            compared.append(attention.shape.kv_heads)
        return "differs" if attention.shape.kv_heads == LayerBeside.kv_heads else None

    monkeypatch.setattr(checked, "check_coded", check)
    notes = with_kv_codec(with_draft_head(adapter, head), CODEC).notes
    assert sorted(compared) == [READ["num_key_value_heads"], LayerBeside.kv_heads]
    assert "kv_codec is unpacked for every step, slower: a kernel differs" in notes


@emulated
def test_what_prompts_over_coded_pages_take_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(tail, "RAW_TAIL_TOKENS", 64)
    monkeypatch.setattr(coded_pages, "UNPACK_PAGES", 2)
    monkeypatch.setattr(native, "available", lambda: False)  # as on a GPU
    adapter = live_on_a_gpu()
    rows = adapter.new_batch_state()
    row = rows.new()
    without = replace(adapter.footprint, scratch=0, gathered=NO_GATHER_COST)
    figures = []
    for context in (CONTEXT // 2, CONTEXT):
        while row.length < context:
            launches.computed_last(adapter, rows, row, [5] * (tail.batch_end_limit(row.length) - row.length))
        for _ in range(2):  # once more: what is new for good is there then
            before = settled()
            launches.computed_last(adapter, rows, row, [5] * WIDTH)
        found = mx.get_peak_memory() - before
        predicted, short = (predicted_bytes(each, PassPart(WIDTH, row.length)) for each in (adapter.footprint, without))
        assert short < found <= predicted, "more than attention alone takes, and no more than is said"
        figures.append((found, predicted))
    grown, predicted = (later - earlier for earlier, later in zip(*figures, strict=True))
    assert grown == pytest.approx(predicted, rel=0.1), "pages are unpacked once, for all layers"


@emulated
def test_pages_are_gathered_where_no_kernel_reads_them_as_they_lie() -> None:
    """Metal has no kernel for prompts; keys of three bits have none on any GPU."""
    each = READ["num_key_value_heads"] * 2 * READ["head_dim"] * 2
    cuda, metal = shared_gpu(), on_a_gpu(METAL)
    assert cuda.footprint.gathered == GatherCost(0, 0, MOST_QUERIES)
    assert metal.footprint.gathered == GatherCost(0, each, MOST_QUERIES)
    for adapter, codec, few in ((cuda, "turbo3", each), (metal, "k8v4", each)):
        live = with_kv_codec(adapter, PairCodec(CodecName.parse(codec)))
        assert live.footprint.gathered == GatherCost(few, each, MOST_QUERIES)
    assert with_kv_codec(cuda, CODEC).footprint.gathered == GatherCost(0, 0, MOST_QUERIES, unpacked=each)


@freed_at_once
@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", ["raw", "turbo3"])
@pytest.mark.parametrize(("lengths", "width"), [([600], 1), ([600], 40), ([600, 200, 400], 1), ([300] * 4, 3)])
def test_what_gathering_takes_is_predicted_for_every_row(
    codec: str, lengths: list[int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "ENCODE_STEP_TOKENS", 128)
    monkeypatch.setattr(tail, "RAW_TAIL_TOKENS", 64)
    monkeypatch.setattr(coded_pages, "UNPACK_PAGES", 2)
    monkeypatch.setattr(native, "available", lambda: False)
    config = {**READ, "num_hidden_layers": 3}
    raw = adapt_model(random_models.build(config, spread=0.2, dtype=mx.bfloat16), config, current_device())
    adapter = with_kv_codec(raw, PairCodec(CodecName.parse(codec)))
    rows = adapter.new_batch_state()
    live = [rows.new() for _ in lengths]
    for row, length in zip(live, lengths, strict=True):
        while row.length < length:
            end = length if codec == "raw" else min(length, tail.batch_end_limit(row.length))
            launches.computed_last(adapter, rows, row, [5] * (end - row.length))
    tokens = width * len(live)
    for _ in range(2):  # once more: what is new for good is there then
        before = settled()
        mx.eval(
            adapter.run(rows, mx.full((tokens,), 5), [ForwardPart(tuple(live), width)], [tokens - 1]), rows.pending()
        )
    found = mx.get_peak_memory() - before
    part = PassPart(tokens, max(row.length for row in live), len(live))
    assert found <= predicted_bytes(adapter.footprint, part)
    assert found > predicted_bytes(replace(adapter.footprint, scratch=0, gathered=NO_GATHER_COST), part) or width > 1

"""Live KV in fewer bits: what is refused at start, notes for the log, and the memory of a token.

`with_kv_codec` raises ConfigError where the model, or the device, does not support it. `record_form_of` finds the form
of a model's KV records, with those of its draft head, by making one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.codecs.turbo import TurboCodec
from ingot.cache.coded_pages import CodedPageLayout, encode_scratch_bytes, unpack_scratch_bytes, unpacked_token_bytes
from ingot.cache.footprint import Footprint, GatherCost
from ingot.cache.forward_batch import ForwardBatch, ForwardPart
from ingot.cache.layer_state import LayerState
from ingot.cache.records import RecordForm, take_record, unpage_record
from ingot.errors import ConfigError
from ingot.kernels.cpu import native
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.models.adapter import ModelAdapter
from ingot.models.layers.attention_setup import check_coded_attention

SAMPLE_TOKENS = 32


def with_kv_codec(adapter: ModelAdapter, codec: PairCodec, *, is_share: bool = False) -> ModelAdapter:
    """The adapter, whose rows have all but their tails in fewer bits; one with a codec stays as it is. A rank's share
    may have no layers to encode. Raises ConfigError where the model, or the device, does not support it."""
    if not codec.lossy or adapter.live is not None:
        return adapter
    if adapter.has_sinks:
        raise _codec_refusal(
            codec,
            "this model's attention has sinks, fixed scores besides those of keys, so small errors in keys change "
            "what it attends to",
        )
    if adapter.tower is not None and adapter.tower.bidirectional:
        raise _codec_refusal(
            codec,
            "the tokens of an image see each other in this model and are computed at once, also where some of them "
            "would be encoded before others; --text-only serves it without images",
        )
    if isinstance(codec.keys, TurboCodec) and codec.keys.bits == 1:
        raise _codec_refusal(codec, "with one bit, scores are off by three fifths of their spread over keys")
    forms = _page_forms(adapter, codec)
    if not forms and is_share:
        return replace(adapter, live=codec, steps=None)
    if not forms:
        raise _codec_refusal(codec, "this model has no layers that store every token's keys and values")
    for form in forms:
        if (problem := form.problem() or _why_native_cannot_read(adapter, form)) is not None:
            raise _codec_refusal(codec, problem)
    if adapter.kernels is not None:
        _check_coded_kernels(adapter, forms)
    footprint = replace(adapter.footprint, coded=sum(form.token_bytes for form in forms))
    if adapter.device.kind != "cpu" or not native.available():
        footprint = _with_unpacking(adapter, footprint, forms)
    return replace(
        adapter, live=codec, footprint=footprint, steps=None, notes=(*adapter.notes, *_codec_notes(adapter, forms))
    )


def _page_forms(adapter: ModelAdapter, codec: PairCodec) -> list[CodedPageLayout]:
    """Of the layers that store every token."""
    rows = adapter.new_batch_state()
    sample = record_form_of(adapter, rows).sample
    return [
        CodedPageLayout.of(codec, *delta.arrays)
        for delta, state in zip(sample.deltas, rows.states, strict=True)
        if delta is not None and isinstance(state, AppendState) and state.window is None
    ]


def _why_native_cannot_read(adapter: ModelAdapter, form: CodedPageLayout) -> str | None:
    """Why the native kernels, which read all KV where they are installed, cannot read such pages; None if they can."""
    if adapter.device.kind != "cpu" or not native.available() or form.native is not None:
        return None
    return f"the native kernels do not support heads of {form.sizes[0]} and {form.sizes[1]} in it"


def _with_unpacking(adapter: ModelAdapter, footprint: Footprint, forms: Sequence[CodedPageLayout]) -> Footprint:
    """Prompts read unpacked pages, one layer's at a time, and so do single tokens where no kernel reads packed ones.
    Where kernels unpack, layers of a form share the result, and no more scratch is needed than encoding takes."""
    few, many = footprint.gathered.few, footprint.gathered.many
    by_kernels = {form for form in forms if _kernels_unpack(adapter, form)}
    scratch = [encode_scratch_bytes(form) if form in by_kernels else unpack_scratch_bytes(form) for form in forms]
    return replace(
        footprint,
        scratch=footprint.scratch + max(scratch),
        gathered=GatherCost(
            few=max([few, *(unpacked_token_bytes(form) for form in forms if not _attention_reads(adapter, form))]),
            many=max([many, *(unpacked_token_bytes(form) for form in forms if form not in by_kernels)]),
            width=MOST_QUERIES,
            unpacked=sum(map(unpacked_token_bytes, by_kernels)),
        ),
    )


def _check_coded_kernels(adapter: ModelAdapter, forms: Sequence[CodedPageLayout]) -> None:
    """Check a GPU's kernels over pages in fewer bits, for the model and its head: those that differ from plain
    operations are not used."""
    for form in set(forms):
        if (shape := form.kernel_shape) is not None:
            sample = form.sample(shape)
            for model in (adapter.model, adapter.head):
                if isinstance(model, nn.Module):
                    check_coded_attention(model, sample)


def _codec_notes(adapter: ModelAdapter, forms: Sequence[CodedPageLayout]) -> list[str]:
    notes = []
    if any(window is not None for window, _ in adapter.footprint.groups):
        notes.append("kv_codec leaves layers with a window raw: they store little")
    kernels = adapter.kernels
    if not all(_attention_reads(adapter, form) for form in forms):
        why = _kernel_reason({} if kernels is None else kernels.wrong_coded)
        notes.append(f"kv_codec is unpacked for every step, slower: {why}")
    elif adapter.device.kind != "cpu" and not all(_kernels_unpack(adapter, form) for form in forms):
        why = _kernel_reason({} if kernels is None else kernels.wrong_unpacked)
        notes.append(f"kv_codec is unpacked by plain operations for prompts, slower: {why}")
    return notes


def _kernel_reason(wrong: Mapping[Any, str | None]) -> str:
    found = sorted({*filter(None, wrong.values())})
    return f"a kernel {found[0]}" if found else "there is no kernel for this model here"


def _attention_reads(adapter: ModelAdapter, form: CodedPageLayout) -> bool:
    """Whether attention reads such pages without unpacking."""
    if adapter.device.kind == "cpu":
        return form.native is not None
    shape, kernels = form.kernel_shape, adapter.kernels
    return shape is not None and kernels is not None and kernels.reads(shape)


def _kernels_unpack(adapter: ModelAdapter, form: CodedPageLayout) -> bool:
    """Whether a GPU's kernels read such pages, and unpack them for prompts."""
    shape, kernels = form.kernel_shape, adapter.kernels
    return shape is not None and kernels is not None and kernels.reads(shape) and kernels.unpacks(shape)


def _codec_refusal(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"kv_codec {codec.name} cannot be used: {problem}. Use kv_codec raw.", param="kv_codec")


def record_form_of(adapter: ModelAdapter, rows: BatchState) -> RecordForm:
    """A record of this model, to compare others with. Every state has storage afterwards."""
    row = rows.new()
    tokens = mx.array([0] * SAMPLE_TOKENS, dtype=mx.uint32)
    try:
        logits = adapter.run(rows, tokens, [ForwardPart((row,), SAMPLE_TOKENS)], [SAMPLE_TOKENS - 1])
        if adapter.head is not None:
            hidden = mx.zeros((1, SAMPLE_TOKENS, adapter.head.size), mx.bfloat16)
            with rows.aside([ForwardBatch((row,), SAMPLE_TOKENS, (0,), (0,))]) as head_states:
                adapter.head(hidden, tokens[None], head_states[0])
        sample = unpage_record(rows, take_record(rows, row, 0))
        mx.eval(logits, sample.arrays(), rows.pending())
    finally:
        rows.leave(row)
    groups = (
        (state.group.number, state.window is not None) if isinstance(state, AppendState) else None
        for state in rows.states
    )
    return RecordForm(sample, tuple(groups), tuple(map(_page_form_of, rows.states)))


def _page_form_of(state: LayerState) -> CodedPageLayout | None:
    coded = state.stored.coded if isinstance(state, AppendState) else None
    return None if coded is None else coded.form

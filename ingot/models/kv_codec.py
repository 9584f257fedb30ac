"""Live keys and values in fewer bits: what is refused at start, what is said, and what a token takes then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.codecs.turbo import Turbo
from ingot.cache.coded_pages import PageForm
from ingot.cache.footprint import Footprint, Gathered
from ingot.cache.unpacking import encoding_bytes, scratch_bytes, unpacked_bytes
from ingot.errors import ConfigError
from ingot.kernels import native
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.models.adapter import Adapter
from ingot.models.form import form_of
from ingot.models.layers.attention import check_coded


def with_live_codec(adapter: Adapter, codec: PairCodec, *, is_share: bool = False) -> Adapter:
    """The adapter, whose rows have all but their tails in fewer bits; one that has such already stays as it is. Of a
    model that several ranks have, a share may have no layers to which that matters. Raises ConfigError where the model,
    or the device, cannot do that."""
    if not codec.lossy or adapter.live is not None:
        return adapter
    if adapter.has_sinks:
        raise _refused(
            codec,
            "this model's attention has sinks, which weigh keys against a fixed number, so that small errors in keys "
            "change what it attends to",
        )
    if adapter.tower is not None and adapter.tower.mutual:
        raise _refused(
            codec,
            "the tokens of a picture see each other in this model and are computed at once, also where some of them "
            "would be coded before others; --text-only serves it without pictures",
        )
    if isinstance(codec.keys, Turbo) and codec.keys.bits == 1:
        raise _refused(codec, "with one bit, scores are off by three fifths of how far they spread over keys")
    forms = _forms(adapter, codec)
    if not forms and is_share:
        return replace(adapter, live=codec, steps=None)
    if not forms:
        raise _refused(codec, "this model has no layers that keep every token's keys and values")
    for form in forms:
        if (problem := form.problem() or _unread(adapter, form)) is not None:
            raise _refused(codec, problem)
    if adapter.kernels is not None:
        _compare(adapter, forms)
    footprint = replace(adapter.footprint, coded=sum(form.token_bytes for form in forms))
    if adapter.device.kind != "cpu" or not native.available():
        footprint = _with_unpacking(adapter, footprint, forms)
    return replace(
        adapter, live=codec, footprint=footprint, steps=None, notes=(*adapter.notes, *_remarks(adapter, forms))
    )


def _forms(adapter: Adapter, codec: PairCodec) -> list[PageForm]:
    """Of the layers that keep every token."""
    rows = adapter.new_rows()
    sample = form_of(adapter, rows).sample
    found = []
    for delta, state in zip(sample.deltas, rows.states, strict=True):
        if delta is not None and isinstance(state, AppendState) and state.window is None:
            keys, values = delta.arrays
            found.append(PageForm(codec, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype))
    return found


def _unread(adapter: Adapter, form: PageForm) -> str | None:
    """Why the native kernels, which read all that is stored where there are some, cannot read such pages, if so."""
    if adapter.device.kind != "cpu" or not native.available() or form.native is not None:
        return None
    return f"the native kernels read no heads of {form.sizes[0]} and {form.sizes[1]} in it"


def _with_unpacking(adapter: Adapter, footprint: Footprint, forms: Sequence[PageForm]) -> Footprint:
    """Prompts see pages unpacked, one layer's at a time, and so do single tokens where no kernel reads them. Where
    kernels unpack, layers of a form share what comes of it, and no more is held on the way than encoding takes."""
    few, many = footprint.gathered.few, footprint.gathered.many
    by_kernels = {form for form in forms if _is_unpacked(adapter, form)}
    beside = [encoding_bytes(form) if form in by_kernels else scratch_bytes(form) for form in forms]
    return replace(
        footprint,
        scratch=footprint.scratch + max(beside),
        gathered=Gathered(
            few=max([few, *(unpacked_bytes(form) for form in forms if not _is_read(adapter, form))]),
            many=max([many, *(unpacked_bytes(form) for form in forms if form not in by_kernels)]),
            width=MOST_QUERIES,
            unpacked=sum(map(unpacked_bytes, by_kernels)),
        ),
    )


def _compare(adapter: Adapter, forms: Sequence[PageForm]) -> None:
    """A GPU's kernels over pages in fewer bits, the model's and its head's, with plain operations: those that differ
    read none."""
    for form in set(forms):
        if (shape := form.kernel_shape) is not None:
            sample = form.sample(shape)
            for model in (adapter.model, adapter.head):
                if isinstance(model, nn.Module):
                    check_coded(model, sample)


def _remarks(adapter: Adapter, forms: Sequence[PageForm]) -> list[str]:
    said = []
    if any(window is not None for window, _ in adapter.footprint.groups):
        said.append("kv_codec leaves layers that see a window raw: they keep little")
    kernels = adapter.kernels
    if not all(_is_read(adapter, form) for form in forms):
        why = _why({} if kernels is None else kernels.wrong_coded)
        said.append(f"kv_codec is unpacked for every step, slower: {why}")
    elif adapter.device.kind != "cpu" and not all(_is_unpacked(adapter, form) for form in forms):
        why = _why({} if kernels is None else kernels.wrong_unpacked)
        said.append(f"kv_codec is unpacked by plain operations for prompts, slower: {why}")
    return said


def _why(wrong: Mapping[Any, str | None]) -> str:
    found = sorted({*filter(None, wrong.values())})
    return f"a kernel {found[0]}" if found else "there is no kernel for this model here"


def _is_read(adapter: Adapter, form: PageForm) -> bool:
    """Whether attention reads such pages as they lie."""
    if adapter.device.kind == "cpu":
        return form.native is not None
    shape, kernels = form.kernel_shape, adapter.kernels
    return shape is not None and kernels is not None and kernels.reads(shape)


def _is_unpacked(adapter: Adapter, form: PageForm) -> bool:
    """Whether a GPU's kernels unpack such pages for prompts, which takes that they read them."""
    shape, kernels = form.kernel_shape, adapter.kernels
    return shape is not None and kernels is not None and kernels.reads(shape) and kernels.unpacks(shape)


def _refused(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"kv_codec {codec.name} cannot be used: {problem}. Use kv_codec raw.", param="kv_codec")

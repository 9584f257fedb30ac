"""Live keys and values in fewer bits: what is refused at start, what is said, and what a token takes then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.codecs.turbo import Turbo
from ingot.cache.footprint import Footprint
from ingot.cache.layers import AppendState
from ingot.cache.page_form import PageForm
from ingot.cache.unpacking import scratch_bytes, unpacked_bytes
from ingot.engine.form import form_of
from ingot.errors import ConfigError
from ingot.kernels import native
from ingot.models.adapter import Adapter
from ingot.models.layers.attention import check_coded


def with_live_codec(adapter: Adapter, codec: PairCodec) -> Adapter:
    """The adapter, whose rows have all but their tails in fewer bits. Raises ConfigError where the model, or the
    device, cannot do that."""
    if not codec.lossy:
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
    if not forms:
        raise _refused(codec, "this model has no layers that keep every token's keys and values")
    for form in forms:
        if (problem := form.problem() or _unread(adapter, form)) is not None:
            raise _refused(codec, problem)
    if adapter.kernels is not None:
        _compare(adapter, forms)
    footprint = replace(adapter.footprint, coded=sum(form.token_bytes for form in forms))
    if adapter.device.kind != "cpu" or not native.available():
        footprint = _with_unpacking(footprint, forms)
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


def _with_unpacking(footprint: Footprint, forms: Sequence[PageForm]) -> Footprint:
    """Prompts see pages unpacked, one layer's at a time."""
    return replace(
        footprint,
        scratch=footprint.scratch + max(map(scratch_bytes, forms)),
        unpacked=max(map(unpacked_bytes, forms)),
    )


def _compare(adapter: Adapter, forms: Sequence[PageForm]) -> None:
    """A GPU's kernels over pages in fewer bits with plain operations: those that differ read none."""
    for form in set(forms):
        if (shape := form.kernel_shape) is not None:
            check_coded(adapter.model, form.sample(shape))


def _remarks(adapter: Adapter, forms: Sequence[PageForm]) -> list[str]:
    said = []
    if any(window is not None for window, _ in adapter.footprint.groups):
        said.append("kv_codec leaves layers that see a window raw: they keep little")
    if not all(_is_read(adapter, form) for form in forms):
        wrong = [] if adapter.kernels is None else sorted({*filter(None, adapter.kernels.wrong_coded.values())})
        why = f"a kernel {wrong[0]}" if wrong else "there is no kernel for this model here"
        said.append(f"kv_codec is unpacked for every step, slower: {why}")
    return said


def _is_read(adapter: Adapter, form: PageForm) -> bool:
    """Whether attention reads such pages as they lie."""
    if adapter.device.kind == "cpu":
        return form.native is not None
    shape, kernels = form.kernel_shape, adapter.kernels
    return shape is not None and kernels is not None and kernels.reads(shape)


def _refused(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"kv_codec {codec.name} cannot be used: {problem}. Use kv_codec raw.", param="kv_codec")

"""Live keys and values in fewer bits: what is refused at start, what is said, and what a token takes then."""

from __future__ import annotations

from dataclasses import replace

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.layers import AppendState
from ingot.cache.page_form import PageForm
from ingot.engine.form import form_of
from ingot.errors import ConfigError
from ingot.models.adapter import Adapter


def with_live_codec(adapter: Adapter, codec: PairCodec) -> Adapter:
    """The adapter, whose rows have all but their tails in fewer bits. Raises ConfigError where the model, or the device,
    cannot do that."""
    if not codec.lossy:
        return adapter
    if adapter.has_sinks:
        raise _refused(
            codec,
            "this model's attention has sinks, which weigh keys against a fixed number, so that small errors in keys "
            "change what it attends to",
        )
    forms = _forms(adapter, codec)
    if not forms:
        raise _refused(codec, "this model has no layers that keep every token's keys and values")
    for form in forms:
        if (problem := form.problem()) is not None:
            raise _refused(codec, problem)
    footprint = replace(adapter.footprint, coded=sum(form.token_bytes for form in forms))
    return replace(adapter, live=codec, footprint=footprint, steps=None, notes=(*adapter.notes, *_remarks(adapter)))


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


def _remarks(adapter: Adapter) -> list[str]:
    windows = any(window is not None for window, _ in adapter.footprint.groups)
    return ["kv_codec leaves layers that see a window raw: they keep little"] if windows else []


def _refused(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"kv_codec {codec.name} cannot be used: {problem}. Use kv_codec raw.", param="kv_codec")

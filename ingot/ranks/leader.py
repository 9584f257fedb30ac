"""Rank 0: an engine like any other, whose live states and forward passes are told to all ranks as they come.

Nothing above the adapter knows of it. What is told goes out before the pass is computed here, and whoever follows is
then as far as rank 0 is: at collectives, which make them wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import msgspec

from ingot.cache.batch_state import Rows
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.forward_batch import Part
from ingot.cache.packing import Form
from ingot.cache.record_encoding import RecordEncoding
from ingot.distributed.control_channel import Kind
from ingot.distributed.group import Share, Whole
from ingot.distributed.leader import LeadingDisk
from ingot.distributed.leader_state import LeadingRows
from ingot.distributed.wire import Link
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from ingot.models.live_states import live_states
from ingot.ranks.kept import LeadingEncoding, PlainLeadingEncoding
from ingot.ranks.voice import Voice


@dataclass(frozen=True)
class LeadingAdapter(Adapter):
    """The share of rank 0, which is asked as if it were all of the model. A head beside it is rank 0's alone: every
    rank has the hidden states that the last layer gives."""

    whole: Whole = field(kw_only=True)
    voice: Voice = field(kw_only=True)
    group: Any = field(kw_only=True)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def last_step(self) -> int:
        return self.voice.step

    @property
    def ranks_trouble(self) -> str:
        return self.voice.trouble

    def close(self) -> None:
        self.voice.end()

    def new_rows(self, most: int | None = None, earlier: int = 0) -> Rows:
        layers = live_states(self.model, self.margin, self.kept, self.kernels)
        beside = [] if self.head is None else live_states(self.head, 0, self.kept, self.kernels)
        return LeadingRows(layers, beside, self.footprint, self.voice, most, earlier, self.live, mixed=self.mixed)

    def encoding(self, rows: Rows, codec: PairCodec, form: Form | None) -> RecordEncoding:
        assert isinstance(rows, LeadingRows)
        if not codec.lossy:
            return PlainLeadingEncoding(rows, self.voice)
        assert form is not None
        return LeadingEncoding(rows, codec, form, self.voice, self.whole.encoded)

    def lead_disk(self, own: Disk) -> LeadingDisk:
        """Rank 0's part of records on disk, and with it everybody's."""
        return LeadingDisk(own.store, own.writer, own.reader, own.counts, self.voice, self.whole.heavier)

    def run(
        self, rows: Rows, tokens: mx.array, parts: Sequence[Part], at: Sequence[int] | None = None, **asked: Any
    ) -> Any:
        assert isinstance(rows, LeadingRows)
        shared = shared_tokens(tokens, self.group)
        with rows.passing(shared, at):
            return super().run(rows, shared, parts, at, **asked)


def shared_tokens(tokens: mx.array, group: Any) -> mx.array:
    """Those of rank 0, on every rank; the others bring zeros. The first collective of a pass, and to be evaluated as
    such, whatever else of it depends on them."""
    return mx.distributed.all_sum(tokens.astype(mx.uint32), group=group)


def lead(own: Share, adapter: Adapter, links: Sequence[Link], group: Any, within: float) -> LeadingAdapter:
    """Hear what the others have loaded, and lead them; `own` is what this one has. Raises ModelError where they cannot
    be led, Unavailable where somebody is gone or does not say anything `within` so many seconds."""
    shares = [own, *(_share(link, within) for link in links)]
    if len({share.vocab for share in shares}) > 1:
        raise ModelError("The ranks have loaded models with different vocabularies: the same files must be on each.")
    whole = Whole.of(shares)
    known = {each.name: getattr(adapter, each.name) for each in fields(Adapter)}
    settled = {"footprint": whole.footprint, "ragged": whole.ragged, "mixed": whole.mixed}
    return LeadingAdapter(**known | settled, whole=whole, voice=Voice(links), group=group)


def _share(link: Link, within: float) -> Share:
    frame = link.receive(within)
    if frame.kind == Kind.FAILED:
        raise ModelError(frame.body.decode(errors="replace"))
    return msgspec.msgpack.decode(frame.body, type=Share)

"""Rank 0: an engine like any other, which sends changes of its KV and its forward passes to the followers.

Nothing above the adapter knows of it. Events are sent before the pass is computed here; from there on, collectives keep
the ranks in step.

Cached records: rank 0 decides what becomes of them, and each rank has its part, on disk in a file of its own. A record
is there if every rank has its part. Rank 0 knows its own files; whether the followers have theirs turns out when all
ranks read at once: one that lacks its part, or finds it damaged, makes it a miss for all. Missing answers count as
failures: a read is given up after a while, and what was not written everywhere is not there.

A pass is sent as one message before rank 0 computes it; its tokens come by a collective (zeros from all ranks but 0),
because they may have been sampled on the device and be unknown to Python. Collectives carry tensors alone, there are
none while nothing runs, and within a pass each depends on the one before, so that all ranks meet them in the same
order. A follower that fails says why and exits; requests then end with a 503, as they do if a pass fails on rank 0 that
the others were sent.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import mlx.core as mx
import msgspec

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.backend import MOST_WAITING, PAUSE_S, DiskBackend, PendingRead
from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.record_file import RecordHeader, StoredData, file_variant
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.kv_deltas import EncodedSize, LayerDeltas
from ingot.cache.page_groups import PageGroup
from ingot.cache.record_encoding import LossyEncoding, RecordEncoding
from ingot.cache.records import Record, RecordForm, UnpagedRecord, record_extents
from ingot.distributed import control_channel
from ingot.distributed.control_channel import ControlChannel, FollowerQuestion, FrameKind
from ingot.distributed.group import GroupTotals, RankShare
from ingot.distributed.leader_state import EncodedSizing, LeaderBatchState, SharedCheckpoint, SharedDeltas, SharedPiece
from ingot.distributed.wire import Link
from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.forward import kv_states_for


@dataclass(frozen=True)
class LeaderAdapter(ModelAdapter):
    """The share of rank 0, used as if it were the whole model. A draft head runs on rank 0 alone: every rank has the
    last layer's hidden states."""

    whole: GroupTotals = field(kw_only=True)
    channel: ControlChannel = field(kw_only=True)
    group: Any = field(kw_only=True)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def last_step(self) -> int:
        return self.channel.step

    @property
    def ranks_trouble(self) -> str:
        return self.channel.trouble

    def close(self) -> None:
        self.channel.end()

    def new_batch_state(self, most: int | None = None, earlier: int = 0) -> BatchState:
        layers = kv_states_for(self.model, self.margin, self.kept, self.kernels)
        head = [] if self.head is None else kv_states_for(self.head, 0, self.kept, self.kernels)
        return LeaderBatchState(layers, head, self.footprint, self.channel, most, earlier, self.live, mixed=self.mixed)

    def encoding(self, rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
        assert isinstance(rows, LeaderBatchState)
        if not codec.lossy:
            return LeaderRawEncoding(rows, self.channel)
        assert form is not None
        return LeaderLossyEncoding(rows, codec, form, self.channel, self.whole.encoded)

    def leader_disk(self, own: DiskBackend) -> LeaderDiskBackend:
        """The records on disk of all ranks, by rank 0's part of them."""
        return LeaderDiskBackend(own.store, own.writer, own.reader, own.counts, self.channel, self.whole.heavier)

    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        assert isinstance(rows, LeaderBatchState)
        shared = broadcast_tokens(tokens, self.group)
        with rows.passing(shared, at):
            return super().run(rows, shared, parts, at, **options)


def broadcast_tokens(tokens: mx.array, group: Any) -> mx.array:
    """Rank 0's tokens, on every rank; the followers pass zeros. The first collective of a pass."""
    return mx.distributed.all_sum(tokens.astype(mx.uint32), group=group)


def lead_group(
    own: RankShare, adapter: ModelAdapter, links: Sequence[Link], group: Any, within: float
) -> LeaderAdapter:
    """Receive what the followers have loaded, and lead them; `own` is this rank's share. Raises ModelError where the
    shares do not match, Unavailable where a follower is gone or silent for `within` seconds."""
    shares = [own, *(_receive_share(link, within) for link in links)]
    if len({share.vocab for share in shares}) > 1:
        raise ModelError("The ranks have loaded models with different vocabularies: the same files must be on each.")
    whole = GroupTotals.of(shares)
    own_fields = {each.name: getattr(adapter, each.name) for each in fields(ModelAdapter)}
    common = {"footprint": whole.footprint, "ragged": whole.ragged, "mixed": whole.mixed}
    return LeaderAdapter(**own_fields | common, whole=whole, channel=ControlChannel(links), group=group)


def _receive_share(link: Link, within: float) -> RankShare:
    frame = link.receive(within)
    if frame.kind == FrameKind.FAILED:
        raise ModelError(frame.body.decode(errors="replace"))
    return msgspec.msgpack.decode(frame.body, type=RankShare)


@dataclass(frozen=True, slots=True)
class SharedStoredData(StoredData):
    """Rank 0's part of a record that every rank has read."""

    piece: SharedPiece


class LeaderRawEncoding(RecordEncoding):
    """Records leave and enter pages on every rank at once."""

    def __init__(self, rows: LeaderBatchState, channel: ControlChannel) -> None:
        super().__init__(rows)
        self._leading, self._channel = rows, channel

    def loose(self, record: Record) -> UnpagedRecord:
        piece, loose = unpage_everywhere(self._channel, record), super().loose(record)
        return replace(loose, deltas=SharedDeltas.of(loose.deltas, piece, None))

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        return _share_record(self._leading, self._channel, found, super().opened(found, form), None)


class LeaderLossyEncoding(LossyEncoding):
    """Records are encoded, cut and put back into pages on every rank at once. A record's size is that on the rank where
    it is largest."""

    def __init__(
        self,
        rows: LeaderBatchState,
        codec: PairCodec,
        form: RecordForm,
        channel: ControlChannel,
        sizes: Mapping[int | None, EncodedSize],
    ) -> None:
        """`sizes` are those of all ranks, by window."""
        super().__init__(rows, codec, form)
        others = (sizes.get(group.window, (0, 0)) for group in rows.groups)
        both = zip(self._sizes, others, strict=True)
        self._sizes = tuple((max(own[0], most[0]), max(own[1], most[1])) for own, most in both)
        self._leading, self._channel, self._sizing = rows, channel, EncodedSizing.of(rows, self._sizes)

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        return _share_record(self._leading, self._channel, found, super().opened(found, form), self._sizing)

    def _encoded(self, record: Record) -> LayerDeltas:
        piece = unpage_everywhere(self._channel, record)
        return SharedDeltas.of(super()._encoded(record), piece, self._sizing)

    def _decoded(self, deltas: LayerDeltas, group: PageGroup) -> LayerDeltas:
        assert isinstance(deltas, SharedDeltas)
        return SharedDeltas.of(super()._decoded(deltas, group), deltas.piece, self._sizing)


def unpage_everywhere(channel: ControlChannel, record: Record) -> SharedPiece:
    """Copy a record out of its pages on every rank."""
    piece = SharedPiece(channel)
    places = [(extent.begin, extent.end, array("i", extent.places).tobytes()) for extent in record_extents(record)]
    channel.note_pages()
    channel.queue(control_channel.PieceMade(piece.number, places))
    return piece


def _share_record(
    rows: LeaderBatchState,
    channel: ControlChannel,
    found: StoredData,
    loose: UnpagedRecord,
    sizing: EncodedSizing | None,
) -> UnpagedRecord:
    """A record that was read here, as one of all ranks."""
    assert isinstance(found, SharedStoredData), "a file that the followers have not read"
    deltas, checkpoint = SharedDeltas.of(loose.deltas, found.piece, sizing), loose.checkpoint
    if checkpoint is not None:
        shared = checkpoint = rows.shared_checkpoint(checkpoint)
        channel.queue(control_channel.CheckpointOnloaded(found.piece.number, shared.number))
    return replace(loose, deltas=deltas, checkpoint=checkpoint)


log = logging.getLogger("ingot.cache")

POLL_S: Final = 0.01


class SharedRead(PendingRead):
    """A read of all ranks' parts of a record. For the engine thread."""

    __slots__ = ("_channel", "_own", "_piece", "_question")

    def __init__(self, own: PendingRead, channel: ControlChannel) -> None:
        super().__init__(own.entry)
        self._own, self._channel, self._piece = own, channel, SharedPiece(channel)
        self._question = channel.ask(self._piece.number)
        channel.send(control_channel.PieceOnloaded(self._piece.number, file_ref(own.entry), own.entry.checkpoint))

    @property
    def done(self) -> bool:
        if not super().done:
            self._look()
        return super().done

    def cancel(self) -> None:
        self._own.cancel()
        self._channel.forget_question(self._piece.number)

    def wait(self, within_s: float) -> bool:
        if self._own.wait(within_s) and not self._question.settled:
            self._channel.receive_answers(within_s)
        return self.done

    def _look(self) -> None:
        if not self._question.settled:
            self._channel.receive_answers()
        if not self._own.done or not self._question.settled:
            return
        self.seconds = self._own.seconds
        self.gone = self._own.gone
        found = self._own.found
        if not self._question.good:
            log.warning("%s cannot be read: another rank lacks its part, or found it damaged", self.entry.name)
            self.entry.lost = True
            found = None
        self.finish(None if found is None else SharedStoredData(found.header, found.tensors, self._piece))


class PendingGroupWrites:
    """Records that not all ranks have written yet. What a rank could not write is lost, and there are no further writes
    for a while: its drive may be full, or gone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._paused_until = clock, 0.0
        self._writes: list[tuple[DiskEntry, FollowerQuestion]] = []

    def add(self, entry: DiskEntry, question: FollowerQuestion) -> None:
        self._writes.append((entry, question))

    @property
    def entries(self) -> list[DiskEntry]:
        return [entry for entry, _ in self._writes]

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def settle(self) -> None:
        """Take the answers that were received."""
        failed = [entry for entry, question in self._writes if question.settled and not question.good]
        self._writes = [(entry, question) for entry, question in self._writes if not question.settled]
        for entry in failed:
            entry.lost = True
            self._paused_until = self._clock() + PAUSE_S


@dataclass(frozen=True, slots=True)
class LeaderDiskBackend(DiskBackend):
    """Rank 0's files. What followers have not written yet counts as waiting, so that no rank gets more than it can
    write."""

    channel: ControlChannel
    heavier: float
    """How many times larger than here a record is on the rank where it is largest."""
    writing: PendingGroupWrites = field(default_factory=PendingGroupWrites)

    def has_room(self) -> bool:
        self._look()
        waiting = sum(map(self.memory_of, self.writing.entries))
        return waiting < MOST_WAITING and not self.writing.is_paused and DiskBackend.has_room(self)

    def stored(self, name: str) -> DiskEntry | None:
        """None: whether followers still have their parts turns out when they are read."""
        return None

    def doubt(self, entries: Sequence[DiskEntry]) -> None:
        """A rank that lacks one part may lack these too. They are written again once they are computed again."""
        for entry in entries:
            entry.lost = True

    def offer(self, header: RecordHeader, data: tuple[bytes, ...], record: UnpagedRecord) -> DiskEntry | None:
        entry = DiskBackend.offer(self, header, data, record)
        if entry is None:
            return None
        deltas, checkpoint = record.deltas, record.checkpoint
        assert isinstance(deltas, SharedDeltas), "KV that the followers do not have"
        assert checkpoint is None or isinstance(checkpoint, SharedCheckpoint)
        question = self.channel.number()
        self.writing.add(entry, self.channel.ask(question))
        self.channel.send(
            control_channel.PieceOffloaded(
                question,
                deltas.piece.number,
                None if checkpoint is None else checkpoint.number,
                file_ref(entry),
                header.before,
                list(header.oldest),
                list(header.record.tokens),
                header.record.landmark,
            )
        )
        return entry

    def ask(self, entry: DiskEntry) -> PendingRead:
        return SharedRead(DiskBackend.ask(self, entry), self.channel)

    def touch(self, entries: Sequence[DiskEntry]) -> None:
        DiskBackend.touch(self, entries)
        if entries:
            self.channel.queue(control_channel.FilesUsed([file_ref(entry) for entry in entries]))

    def memory_of(self, entry: DiskEntry) -> int:
        return int(self.heavier * entry.size)

    def forget_on_followers(self, tenant: str) -> None:
        self.channel.send(control_channel.TenantForgotten(tenant))

    def drain(self, within_s: float) -> bool:
        """On all ranks."""
        until = time.monotonic() + within_s
        own = DiskBackend.drain(self, within_s)
        self._look()
        while self.writing.entries and time.monotonic() < until:
            self.channel.receive_answers(POLL_S)
            self._look()
        return own and not self.writing.entries

    def close(self, within_s: float) -> None:
        try:
            self.drain(within_s)
        finally:
            DiskBackend.close(self, within_s)

    def _look(self) -> None:
        if self.writing.entries:
            self.channel.receive_answers()
            self.writing.settle()


def file_ref(entry: DiskEntry) -> control_channel.FileRef:
    return control_channel.FileRef(
        entry.owner.tenant, entry.owner.salt, entry.path, entry.begin, file_variant(entry.name)
    )

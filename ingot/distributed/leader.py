"""Rank 0: an engine like any other, whose live states and forward passes are told to all ranks as they come.

Nothing above the adapter knows of it. What is told goes out before the pass is computed here, and whoever follows is
then as far as rank 0 is: at collectives, which make them wait for each other.

Cached records: rank 0 says what becomes of them, and each rank has its part. On disk, each rank has its own part of
each in a file of its own. A record is there where every rank has its part whole. Rank 0 knows its own files; whether
the others have theirs turns out when they are read, by everybody at once: one that lacks its part, or finds it damaged,
makes it a miss for all. An answer that does not come is no answer: whoever reads gives up after a while, and what was
not written everywhere is not there.
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
    """The share of rank 0, which is asked as if it were all of the model. A head beside it is rank 0's alone: every
    rank has the hidden states that the last layer gives."""

    whole: GroupTotals = field(kw_only=True)
    voice: ControlChannel = field(kw_only=True)
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

    def new_batch_state(self, most: int | None = None, earlier: int = 0) -> BatchState:
        layers = kv_states_for(self.model, self.margin, self.kept, self.kernels)
        beside = [] if self.head is None else kv_states_for(self.head, 0, self.kept, self.kernels)
        return LeaderBatchState(layers, beside, self.footprint, self.voice, most, earlier, self.live, mixed=self.mixed)

    def encoding(self, rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
        assert isinstance(rows, LeaderBatchState)
        if not codec.lossy:
            return LeaderRawEncoding(rows, self.voice)
        assert form is not None
        return LeaderLossyEncoding(rows, codec, form, self.voice, self.whole.encoded)

    def leader_disk(self, own: DiskBackend) -> LeaderDiskBackend:
        """Rank 0's part of records on disk, and with it everybody's."""
        return LeaderDiskBackend(own.store, own.writer, own.reader, own.counts, self.voice, self.whole.heavier)

    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = None,
        **asked: Any,
    ) -> Any:
        assert isinstance(rows, LeaderBatchState)
        shared = broadcast_tokens(tokens, self.group)
        with rows.passing(shared, at):
            return super().run(rows, shared, parts, at, **asked)


def broadcast_tokens(tokens: mx.array, group: Any) -> mx.array:
    """Those of rank 0, on every rank; the others bring zeros. The first collective of a pass, and to be evaluated as
    such, whatever else of it depends on them."""
    return mx.distributed.all_sum(tokens.astype(mx.uint32), group=group)


def lead_group(
    own: RankShare, adapter: ModelAdapter, links: Sequence[Link], group: Any, within: float
) -> LeaderAdapter:
    """Hear what the others have loaded, and lead them; `own` is what this one has. Raises ModelError where they cannot
    be led, Unavailable where somebody is gone or does not say anything `within` so many seconds."""
    shares = [own, *(_receive_share(link, within) for link in links)]
    if len({share.vocab for share in shares}) > 1:
        raise ModelError("The ranks have loaded models with different vocabularies: the same files must be on each.")
    whole = GroupTotals.of(shares)
    known = {each.name: getattr(adapter, each.name) for each in fields(ModelAdapter)}
    settled = {"footprint": whole.footprint, "ragged": whole.ragged, "mixed": whole.mixed}
    return LeaderAdapter(**known | settled, whole=whole, voice=ControlChannel(links), group=group)


def _receive_share(link: Link, within: float) -> RankShare:
    frame = link.receive(within)
    if frame.kind == FrameKind.FAILED:
        raise ModelError(frame.body.decode(errors="replace"))
    return msgspec.msgpack.decode(frame.body, type=RankShare)


@dataclass(frozen=True, slots=True)
class SharedStoredData(StoredData):
    """Rank 0's part of what every rank has read of a record."""

    piece: SharedPiece


class LeaderRawEncoding(RecordEncoding):
    """What leaves its pages for files does so on every rank, and comes back so."""

    def __init__(self, rows: LeaderBatchState, voice: ControlChannel) -> None:
        super().__init__(rows)
        self._leading, self._control_channel = rows, voice

    def loose(self, record: Record) -> UnpagedRecord:
        piece, loose = unpage_everywhere(self._control_channel, record), super().loose(record)
        return replace(loose, deltas=SharedDeltas.of(loose.deltas, piece, None))

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        return _share_record(self._leading, self._control_channel, found, super().opened(found, form), None)


class LeaderLossyEncoding(LossyEncoding):
    """What is encoded, cut or put back into pages here is so on every rank. A record takes what it takes where that is
    most."""

    def __init__(
        self,
        rows: LeaderBatchState,
        codec: PairCodec,
        form: RecordForm,
        voice: ControlChannel,
        sizes: Mapping[int | None, EncodedSize],
    ) -> None:
        """`sizes` are those of all ranks, by window."""
        super().__init__(rows, codec, form)
        others = (sizes.get(group.window, (0, 0)) for group in rows.groups)
        both = zip(self._sizes, others, strict=True)
        self._sizes = tuple((max(own[0], most[0]), max(own[1], most[1])) for own, most in both)
        self._leading, self._control_channel, self._sizing = rows, voice, EncodedSizing.of(rows, self._sizes)

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        return _share_record(self._leading, self._control_channel, found, super().opened(found, form), self._sizing)

    def _encoded(self, record: Record) -> LayerDeltas:
        piece = unpage_everywhere(self._control_channel, record)
        return SharedDeltas.of(super()._encoded(record), piece, self._sizing)

    def _decoded(self, deltas: LayerDeltas, group: PageGroup) -> LayerDeltas:
        assert isinstance(deltas, SharedDeltas)
        return SharedDeltas.of(super()._decoded(deltas, group), deltas.piece, self._sizing)


def unpage_everywhere(voice: ControlChannel, record: Record) -> SharedPiece:
    """What a record that has its pages is outside of them, everywhere."""
    piece = SharedPiece(voice)
    places = [(extent.begin, extent.end, array("i", extent.places).tobytes()) for extent in record_extents(record)]
    voice.note_pages()
    voice.note(control_channel.PieceMade(piece.number, places))
    return piece


def _share_record(
    rows: LeaderBatchState, voice: ControlChannel, found: StoredData, loose: UnpagedRecord, sizing: EncodedSizing | None
) -> UnpagedRecord:
    """What was read here, as everybody's."""
    assert isinstance(found, SharedStoredData), "a file that the other ranks have not read"
    deltas, checkpoint = SharedDeltas.of(loose.deltas, found.piece, sizing), loose.checkpoint
    if checkpoint is not None:
        told = checkpoint = rows.shared_checkpoint(checkpoint)
        voice.note(control_channel.CheckpointRecalled(found.piece.number, told.number))
    return replace(loose, deltas=deltas, checkpoint=checkpoint)


log = logging.getLogger("ingot.cache")

LOOK_S: Final = 0.01


class SharedRead(PendingRead):
    """Of everybody's parts of a record. For the engine's thread."""

    __slots__ = ("_control_channel", "_own", "_piece", "_question")

    def __init__(self, own: PendingRead, voice: ControlChannel) -> None:
        super().__init__(own.entry)
        self._own, self._control_channel, self._piece = own, voice, SharedPiece(voice)
        self._question = voice.ask(self._piece.number)
        voice.tell(control_channel.PieceFetched(self._piece.number, file_ref(own.entry), own.entry.checkpoint))

    @property
    def done(self) -> bool:
        if not super().done:
            self._look()
        return super().done

    def cancel(self) -> None:
        self._own.cancel()
        self._control_channel.forget_question(self._piece.number)

    def wait(self, within_s: float) -> bool:
        if self._own.wait(within_s) and not self._question.settled:
            self._control_channel.listen(within_s)
        return self.done

    def _look(self) -> None:
        if not self._question.settled:
            self._control_channel.listen()
        if not self._own.done or not self._question.settled:
            return
        self.seconds = self._own.seconds
        self.gone = self._own.gone
        if not self._question.good:
            log.warning("%s cannot be read back: another rank lacks its part, or found it damaged", self.entry.name)
            self.entry.lost = True
        self.finish(self._as_shared(self._own.found) if self._question.good else None)

    def _as_shared(self, found: StoredData | None) -> StoredData | None:
        return None if found is None else SharedStoredData(found.header, found.tensors, self._piece)


class PendingGroupWrites:
    """Records that not everybody has said to have written. What a rank could not write is lost, and nobody is asked for
    more for a while: its drive may be full, or gone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._paused_until = clock, 0.0
        self._asked: list[tuple[DiskEntry, FollowerQuestion]] = []

    def add(self, entry: DiskEntry, question: FollowerQuestion) -> None:
        self._asked.append((entry, question))

    @property
    def entries(self) -> list[DiskEntry]:
        return [entry for entry, _ in self._asked]

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def look(self) -> None:
        """Once answers were heard."""
        settled = [(entry, question) for entry, question in self._asked if question.settled]
        self._asked = [(entry, question) for entry, question in self._asked if not question.settled]
        for entry in (entry for entry, question in settled if not question.good):
            entry.lost = True
            self._paused_until = self._clock() + PAUSE_S


@dataclass(frozen=True, slots=True)
class LeaderDiskBackend(DiskBackend):
    """Rank 0's files. What the others have not said to have written counts as waiting, so that no rank is asked for
    more than it can write."""

    voice: ControlChannel
    heavier: float
    """How many times as much as here a record takes on the rank where it takes most."""
    writing: PendingGroupWrites = field(default_factory=PendingGroupWrites)

    def has_room(self) -> bool:
        self._look()
        waiting = sum(map(self.memory_of, self.writing.entries))
        return waiting < MOST_WAITING and not self.writing.is_paused and DiskBackend.has_room(self)

    def stored(self, name: str) -> DiskEntry | None:
        """None: whether other ranks still have their parts turns out when these are read."""
        return None

    def doubt(self, entries: Sequence[DiskEntry]) -> None:
        """A rank that lacks one part may lack these too. They are written again once they were computed again."""
        for entry in entries:
            entry.lost = True

    def offer(self, header: RecordHeader, data: tuple[bytes, ...], record: UnpagedRecord) -> DiskEntry | None:
        entry = DiskBackend.offer(self, header, data, record)
        if entry is None:
            return None
        deltas, checkpoint = record.deltas, record.checkpoint
        assert isinstance(deltas, SharedDeltas), "states that the other ranks do not know"
        assert checkpoint is None or isinstance(checkpoint, SharedCheckpoint)
        asked = self.voice.number()
        self.writing.add(entry, self.voice.ask(asked))
        self.voice.tell(
            control_channel.PieceFiled(
                asked,
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
        return SharedRead(DiskBackend.ask(self, entry), self.voice)

    def touch(self, entries: Sequence[DiskEntry]) -> None:
        DiskBackend.touch(self, entries)
        if entries:
            self.voice.note(control_channel.FilesUsed([file_ref(entry) for entry in entries]))

    def memory_of(self, entry: DiskEntry) -> int:
        return int(self.heavier * entry.size)

    def forget_on_followers(self, tenant: str) -> None:
        self.voice.tell(control_channel.TenantForgotten(tenant))

    def drain(self, within_s: float) -> bool:
        """Everywhere."""
        until = time.monotonic() + within_s
        own = DiskBackend.drain(self, within_s)
        self._look()
        while self.writing.entries and time.monotonic() < until:
            self.voice.listen(LOOK_S)
            self._look()
        return own and not self.writing.entries

    def close(self, within_s: float) -> None:
        try:
            self.drain(within_s)
        finally:
            DiskBackend.close(self, within_s)

    def _look(self) -> None:
        if self.writing.entries:
            self.voice.listen()
            self.writing.look()


def file_ref(entry: DiskEntry) -> control_channel.FileRef:
    return control_channel.FileRef(
        entry.owner.tenant, entry.owner.salt, entry.path, entry.begin, file_variant(entry.name)
    )

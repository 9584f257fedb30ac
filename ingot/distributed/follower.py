"""Every rank but 0: no scheduler, no prefix cache, no sampling. Applies rank 0's events to its share of the KV.

Of records outside of pages it has its part, which it makes, cuts, writes, reads and puts back as events say. Threads
write and read files; the one thread that follows polls them, puts what was read into arrays, and answers rank 0. No
step waits for a file.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.disk.backend import DiskBackend, PendingRead
from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.record_file import RecordHeader, RecordOwner, record_file_name, record_identity
from ingot.cache.forward_batch import ForwardBatch, ForwardPart, Row
from ingot.cache.kv_deltas import (
    DeltaCodec,
    KVExtent,
    KVPlacement,
    LayerDeltas,
    StateCheckpoint,
    layers_of_group,
    read_deltas,
    read_raw_delta,
    read_stored_delta,
)
from ingot.cache.layer_state import LayerState
from ingot.cache.page_groups import PagePool
from ingot.cache.pages import PageAllocator, PageCopy, PageForms, PageSlots, PageTable
from ingot.cache.records import (
    RecordForm,
    UnpagedRecord,
    describe_record,
    deserialise_record,
    fit_record,
    serialise_record,
)
from ingot.config import Settings
from ingot.distributed import control_channel
from ingot.distributed.control_channel import FrameKind
from ingot.distributed.group import RankRecordForm, RankShare, join_group
from ingot.distributed.leader import broadcast_tokens
from ingot.distributed.leader_state import numbered_pools
from ingot.distributed.place import RankConfig
from ingot.distributed.wire import Link, LinkFrame, LinkLate, LinkLost
from ingot.errors import IngotError
from ingot.kernels import device
from ingot.kernels.cpu import native
from ingot.models.adapter import ModelAdapter
from ingot.models.cache_key import open_disk_cache
from ingot.models.forward import kv_states_for, run_forward
from ingot.models.parallelism import ModelSharding

MLX_CACHE_PERCENT: Final = 10
"""Percent of its memory that mlx may keep as a cache of freed buffers."""
CLOSING_S: Final = 4.0
"""How long a rank that is no longer needed goes on writing."""
POLL_S: Final = 0.005
"""How often pending reads and writes are polled."""
PASS_INDEPENDENT: Final = (
    control_channel.PieceReleased,
    control_channel.PieceOnloaded,
    control_channel.FilesUsed,
    control_channel.TenantForgotten,
)
"""Events that do not depend on what a running pass computes."""
LONGEST_MESSAGE: Final = 2000
"""Characters of an error."""
OnStep = Callable[[int], None]


class Follower:
    """A share of a model that follows rank 0. Only one thread may call it."""

    def __init__(
        self,
        adapter: ModelAdapter,
        group: Any,
        record_form: RankRecordForm | None = None,
        files: FollowerFiles | None = None,
    ) -> None:
        self._adapter, self._group, self._record_form, self._files = adapter, group, record_form, files
        self._rows: FollowerBatchState | None = None
        self._pieces: FollowerPieces | None = None
        self._mixed = False
        self._running: list[mx.array] = []

    def apply(self, events: control_channel.Events) -> None:
        for event in events:
            if isinstance(event, control_channel.BatchStateCreated):
                layers = kv_states_for(
                    self._adapter.model, self._adapter.margin, self._adapter.kept, self._adapter.kernels
                )
                self._rows, self._mixed = FollowerBatchState(layers, event.windows, self._adapter.live), event.mixed
                if self._record_form is not None:
                    self._pieces = FollowerPieces(self._rows, self._record_form.codec, self._files)
                continue
            assert self._rows is not None, "an event came before there is a batch state"
            if isinstance(event, control_channel.ForwardPass):
                self._pass(self._rows, event)
            elif isinstance(event, control_channel.PieceEvent):
                assert self._pieces is not None, "this rank has no pieces of records"
                if not isinstance(event, PASS_INDEPENDENT):
                    self.settle()
                self._pieces.apply(event)
            else:
                self._rows.apply(event)

    @property
    def has_questions(self) -> bool:
        """Whether answers are pending."""
        return self._files is not None and self._files.busy

    def answers(self) -> list[control_channel.FollowerAnswer]:
        """The answers that are ready."""
        return [] if self._pieces is None else [*self._pieces.answers()]

    def settle(self) -> None:
        """Wait for the running pass."""
        mx.eval(self._running)
        self._running = []

    def _pass(self, rows: FollowerBatchState, plan: control_channel.ForwardPass) -> None:
        tokens = broadcast_tokens(mx.zeros(plan.tokens, mx.uint32), self._group)
        mx.async_eval(tokens)
        adapter = self._adapter
        logits = run_forward(
            adapter.model, adapter.selection, rows, tokens, rows.parts(plan), plan.at, mixed=self._mixed
        )
        self.settle()  # one pass ahead, and no more
        self._running = [logits, *rows.pending()]
        mx.async_eval(self._running)
        if adapter.device.kind == "cpu":
            self.settle()


def run_follower(settings: Settings, folder: Path, where: RankConfig, on_step: OnStep) -> None:
    """Load this rank's share of the model in `folder`, and follow rank 0 until followers are no longer needed. An error
    is sent to rank 0 before it is raised. `on_step` gets 0 when the share is loaded, then each pass's number."""
    joined = join_group(settings, where)
    [link] = joined.links
    try:
        here = device.current_device()
        native.use_one_path(settings.deterministic)
        total = joined.memory_budget(here, settings.memory)
        adapter = joined.load(folder, here, settings)
        record_form = joined.record_form(adapter, settings)
        files = _open_files(settings, adapter, folder, record_form, joined.sharing)
        device.limit_memory(here, total, MLX_CACHE_PERCENT * total // 100)
        share = RankShare.of(adapter, total, {} if record_form is None else record_form.sizes)
        link.send(FrameKind.SHARE, msgspec.msgpack.encode(share))
        on_step(0)
        _follow_events(Follower(adapter, joined.sharing.group, record_form, files), link, on_step)
        if files is not None:
            files.close(CLOSING_S)
    except LinkLost:
        raise
    except Exception as error:
        with suppress(LinkLost, LinkLate):
            link.send(
                FrameKind.FAILED, f"rank {where.rank}: {error or type(error).__name__}"[:LONGEST_MESSAGE].encode()
            )
        raise


def _open_files(
    settings: Settings, adapter: ModelAdapter, folder: Path, record_form: RankRecordForm | None, sharing: ModelSharding
) -> FollowerFiles | None:
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    disk = open_disk_cache(settings, adapter, folder, codec, sharing.part)
    return None if disk is None or record_form is None else FollowerFiles(disk, record_form.form)


def _follow_events(follower: Follower, link: Link, on_step: OnStep) -> None:
    while (frame := _next_frame(follower, link)).kind == FrameKind.EVENTS:
        follower.apply(control_channel.decode_events(frame.body))
        on_step(frame.step)
    follower.settle()


def _next_frame(follower: Follower, link: Link) -> LinkFrame:
    """The next frame of rank 0. Meanwhile pending answers are sent as they become ready."""
    while follower.has_questions:
        for answer in follower.answers():
            link.send(FrameKind.ANSWER, control_channel.encode_answer(answer))
        with suppress(LinkLate):
            return link.receive(POLL_S)
    return link.receive()


class MirroredSlots(PageSlots):
    """Rank 0 counts references; here only its list of free slots is known."""

    def let_go(self, free: Sequence[int]) -> None:
        self._free = list(free)


class MirroredForms(PageForms):
    """Events name slots, so that any page has its own number as its slot."""

    def reach(self, slots: int) -> None:
        """There are so many slots in some pool."""
        for places in (self.raw_of, self.coded_of):
            places.extend(range(len(places), slots))


class MirroredTable(PageTable):
    """The pages of a row by rank 0's events. References are counted on rank 0 alone."""

    def release(self) -> None:
        self.numbers = array("i")

    def rewind(self, length: int) -> None:
        """The table comes with the next pass."""

    def forget(self, oldest: int) -> None:
        """The table comes with the next pass."""


class FollowerBatchState(BatchState):
    _has_spares = False

    def __init__(
        self, layers: list[LayerState], windows: Sequence[control_channel.Window], codec: PairCodec | None
    ) -> None:
        super().__init__(layers, codec=codec, windows=windows)
        self._pools = numbered_pools(self.groups)
        for group in self.groups:
            group.pages = PageAllocator(None if group.coded is None else MirroredForms())
        for pool in self._pools:
            pool.slots = MirroredSlots()
        self._rows_by_slot: dict[int, Row] = {}  # by slot
        self._checkpoints: dict[int, StateCheckpoint] = {}
        self._plan: control_channel.ForwardPass | None = None

    def apply(self, event: control_channel.StateEvent) -> None:
        match event:
            case control_channel.SlotsResized(slots):
                self._resize(slots)
            case control_channel.RowRemoved(slot):
                self._rows_by_slot.pop(slot, None)
            case control_channel.CheckpointMade(number, slot):
                copies = self.checkpoint(self._row(slot))
                if copies is not None:
                    self._checkpoints[number] = copies
            case control_channel.CheckpointResumed(number, slot):
                if number in self._checkpoints:
                    self.resume(self._row(slot), self._checkpoints[number])
            case control_channel.CheckpointDropped(number):
                self._checkpoints.pop(number, None)
            case control_channel.RowRewound(slot, length):
                self.rewind(self._row(slot), length)
            case control_channel.PoolsTrimmed(pools):
                for pool, (slabs, free) in zip(self._pools, pools, strict=True):
                    assert isinstance(pool.slots, MirroredSlots)
                    pool.slots.let_go(array("i", free))
                    pool.keep(slabs)
            case control_channel.PagesMoved(slabs, copies):
                self._grow(slabs)
                for number, moved in copies:
                    if self.groups[number].storages:
                        self.groups[number].copy([PageCopy(*copy) for copy in moved])
            case control_channel.PagesEncoded(number, raw, coded):
                self.groups[number].encode_slots(array("i", raw), array("i", coded))

    def recall(self, number: int, checkpoint: StateCheckpoint | None) -> None:
        """A checkpoint was read from a file, of which this rank may have no part."""
        if checkpoint is not None:
            self._checkpoints[number] = checkpoint

    def recalled(self, number: int | None) -> StateCheckpoint | None:
        """This rank's part of a checkpoint."""
        return None if number is None else self._checkpoints.get(number)

    def parts(self, plan: control_channel.ForwardPass) -> list[ForwardPart]:
        """Of the next forward pass."""
        self._plan = plan
        return [
            ForwardPart(
                tuple(self._planned_row(row) for row in part.rows),
                part.width,
                None if part.stated is None else mx.array(part.stated),
                tentative=part.tentative,
            )
            for part in plan.parts
        ]

    def provide(self, pool: PagePool[Any]) -> None:
        """Pools grow by events."""

    def _planned_row(self, plan: control_channel.RowPlan) -> Row:
        row = self._row(plan.slot)
        row.length, row.position = plan.length, plan.position
        for number, first, slots, coded in plan.tables:
            table = row.tables[number]
            table.first, table.numbers, table.coded = first, array("i", slots), coded
        return row

    def _row(self, slot: int) -> Row:
        if slot not in self._rows_by_slot:
            self._rows_by_slot[slot] = Row(slot, tuple(MirroredTable(group.pages) for group in self.groups))
        return self._rows_by_slot[slot]

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        assert self._plan is not None
        return self._plan.earlier

    def _make_room(self, launches: Sequence[ForwardBatch]) -> None:
        """Pools have grown before the pass."""

    def _encode(self, launches: Sequence[ForwardBatch]) -> None:
        """Pages were quantised by events before the pass."""

    def _grow(self, slabs: Sequence[tuple[int, Sequence[int]]]) -> None:
        for number, pages in slabs:
            self._pools[number].grow_like(pages)
        for group in self.groups:
            if isinstance(group.pages.forms, MirroredForms):
                group.pages.forms.reach(max(sum(pool.slabs) for pool in group.pools))


class FollowerPieces:
    """The pieces of records of one batch state. The caller settles the running pass first."""

    def __init__(self, rows: FollowerBatchState, codec: DeltaCodec | None, files: FollowerFiles | None) -> None:
        """Without a codec, pieces are as in pages."""
        self._rows, self._codec, self._files = rows, codec, files
        self._pieces: dict[int, LayerDeltas] = {}
        self._read: dict[int, StateCheckpoint | None] = {}  # checkpoints that were read with pieces

    def apply(self, event: control_channel.PieceEvent) -> None:
        match event:
            case control_channel.PieceMade(number, extents):
                parts = [KVExtent(begin, end, array("i", slots)) for begin, end, slots in extents]
                self._keep(number, self._copy_from_pages(parts))
            case control_channel.PieceCut(number, made, begin, end, whole):
                piece = self._pieces[number]
                piece = piece if end is None else piece.before(end, whole)
                piece = piece if begin is None else piece.behind(begin, whole)
                self._keep(made, piece.copied())
            case control_channel.PiecePlaced(number, group, coded, held, runs):
                self._place(self._pieces[number], group, KVPlacement(array("i", coded), held, runs))
            case control_channel.CheckpointOnloaded(number, checkpoint):
                self._rows.recall(checkpoint, self._read[number])
            case control_channel.PieceReleased(number):
                self._pieces.pop(number, None)
                self._read.pop(number, None)
                if self._files is not None:
                    self._files.cancel(number)
            case control_channel.PieceOffloaded(number=number, checkpoint=checkpoint):
                self._disk.write(event, self._pieces[number], self._rows.recalled(checkpoint))
            case control_channel.PieceOnloaded():
                self._disk.read(event)
            case control_channel.FilesUsed(used):
                self._disk.touch(used)
            case control_channel.TenantForgotten(tenant):
                self._disk.forget(tenant)

    @property
    def _disk(self) -> FollowerFiles:
        assert self._files is not None, "this rank has no files"
        return self._files

    def answers(self) -> Iterator[control_channel.FollowerAnswer]:
        if self._files is None:
            return
        yield from self._files.finished_writes()
        for number, record in self._files.finished_reads():
            if record is not None:
                self._keep(number, record.deltas)
                self._read[number] = record.checkpoint
            yield control_channel.FollowerAnswer(number, good=record is not None)

    def _copy_from_pages(self, extents: list[KVExtent]) -> LayerDeltas:
        if self._codec is None:
            return read_deltas(self._rows.states, extents, read_stored_delta)
        return self._codec.encode(read_deltas(self._rows.states, extents, read_raw_delta))

    def _place(self, piece: LayerDeltas, number: int, placement: KVPlacement) -> None:
        group = self._rows.groups[number]
        raw = piece if self._codec is None else self._codec.decode(piece, layers_of_group(self._rows.states, group))
        self._rows.lay(group, raw, placement)
        mx.eval(self._rows.pending())

    def _keep(self, number: int, piece: LayerDeltas) -> None:
        mx.eval(piece.arrays())
        self._pieces[number] = piece


log = logging.getLogger("ingot.cache")


@dataclass(frozen=True, slots=True)
class _FollowerRead:
    reading: PendingRead
    checkpoint: bool


class FollowerFiles:
    def __init__(self, disk: DiskBackend, form: RecordForm) -> None:
        """Owns the disk. `form` is that of this rank's part of a record, as it is written."""
        self._disk, self._form = disk, form
        self._readings: dict[int, _FollowerRead] = {}
        self._writing: dict[int, DiskEntry] = {}
        self._refused: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether answers are pending."""
        return bool(self._readings or self._writing or self._refused)

    def read(self, event: control_channel.PieceOnloaded) -> None:
        entry = self._find(event.file)
        if entry is None:
            self._refused.append(event.number)
        else:
            self._readings[event.number] = _FollowerRead(self._disk.reader.ask(entry), event.checkpoint)

    def write(
        self, event: control_channel.PieceOffloaded, deltas: LayerDeltas, checkpoint: StateCheckpoint | None
    ) -> None:
        record = UnpagedRecord(event.file.begin, event.file.begin + len(event.tokens), deltas, checkpoint)
        header = RecordHeader(
            self._disk.store.key,
            _record_owner(event.file),
            event.before,
            event.file.path,
            "",  # here, files are found by their names alone
            tuple(event.oldest),
            describe_record(record, tuple(event.tokens), landmark=event.landmark),
            variant=event.file.variant,
        )
        entry = self._disk.writer.offer(header, tuple(serialise_record(record)))
        if entry is None:
            self._refused.append(event.question)
        else:
            self._writing[event.question] = entry

    def touch(self, files: list[control_channel.FileRef]) -> None:
        found = (self._find(file) for file in files)
        self._disk.store.touch([entry for entry in found if entry is not None])

    def cancel(self, number: int) -> None:
        """A piece is no longer needed."""
        pending = self._readings.pop(number, None)
        if pending is not None:
            pending.reading.cancel()

    def forget(self, tenant: str) -> None:
        """On a thread of its own, as it waits for what is being written."""
        threading.Thread(target=self._forget, args=(tenant,), name="ingot-disk-clearing").start()

    def finished_writes(self) -> Iterator[control_channel.FollowerAnswer]:
        """Answers for finished writes, and for reads and writes that could not be started."""
        refused, self._refused = self._refused, []
        yield from (control_channel.FollowerAnswer(number, good=False) for number in refused)
        for number, entry in [*self._writing.items()]:
            if self._disk.writer.find(entry.name) is not entry:
                del self._writing[number]
                yield control_channel.FollowerAnswer(number, good=not entry.lost)

    def finished_reads(self) -> Iterator[tuple[int, UnpagedRecord | None]]:
        """By number, the records that were read; None for those that are lost."""
        for number, pending in [*self._readings.items()]:
            if pending.reading.done:
                del self._readings[number]
                yield number, self._opened(pending)

    def close(self, within_s: float) -> None:
        self._disk.close(within_s)

    def _find(self, file: control_channel.FileRef) -> DiskEntry | None:
        whose = record_identity(self._disk.store.key, _record_owner(file), file.path, file.begin)
        return self._disk.find(record_file_name(whose, file.variant))

    def _opened(self, pending: _FollowerRead) -> UnpagedRecord | None:
        """None where it is lost, or not what rank 0 expects."""
        found = pending.reading.found
        if found is None:
            return None
        try:
            record = fit_record(deserialise_record(found.header.record, found.tensors), self._form)
        except IngotError as error:
            log.warning("%s: %s", pending.reading.entry.name, error.message)
            pending.reading.entry.lost = True
            return None
        lacking = pending.checkpoint and self._form.sample.checkpoint is not None and record.checkpoint is None
        return None if lacking else record

    def _forget(self, tenant: str) -> None:
        try:
            self._disk.forget(tenant)
        except OSError as error:
            log.error("records in %s cannot be removed: %s", self._disk.store.folder, error)


def _record_owner(file: control_channel.FileRef) -> RecordOwner:
    return RecordOwner(file.tenant, file.salt)

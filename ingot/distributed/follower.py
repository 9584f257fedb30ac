"""Every rank but 0: no scheduler, no prefix cache, no sampling. Does to its share of the live states what it is told.

Of records outside of pages it has its part, made, cut, written, read and put back as it is told. Files are written and
read by threads, as everywhere; whether they are done is looked at by the one thread that follows, which puts what was
read into arrays and says so. No step waits for a file.
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
from ingot.cache.page_groups import PageGroup, PagePool
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
from ingot.distributed.place import RankPlace
from ingot.distributed.wire import Link, LinkFrame, LinkLate, LinkLost
from ingot.errors import IngotError
from ingot.kernels import device
from ingot.kernels.cpu import native
from ingot.models.adapter import ModelAdapter
from ingot.models.cache_key import open_disk_cache
from ingot.models.forward import kv_states_for, run_forward
from ingot.models.parallelism import ModelSharding

MLX_CACHE_PERCENT: Final = 10
"""Percent of its memory that mlx may keep of what passes gave back."""
CLOSING_S: Final = 4.0
"""How long a rank that is not needed any more goes on writing."""
LOOK_S: Final = 0.005
"""How often it looks whether files are read or written, while some are to be."""
PASS_INDEPENDENT: Final = (
    control_channel.PieceReleased,
    control_channel.PieceFetched,
    control_channel.FilesUsed,
    control_channel.TenantForgotten,
)
"""What has nothing to do with the states that a pass under way computes."""
LONGEST_MESSAGE: Final = 2000
"""Characters of what went wrong."""
OnStep = Callable[[int], None]


class Follower:
    """A share of a model, and whoever says what is done with it. Only one thread may call it."""

    def __init__(
        self, adapter: ModelAdapter, group: Any, kept: RankRecordForm | None = None, files: FollowerFiles | None = None
    ) -> None:
        self._adapter, self._group, self._kept, self._files = adapter, group, kept, files
        self._rows: FollowerBatchState | None = None
        self._pieces: FollowerPieces | None = None
        self._mixed = False
        self._running: list[mx.array] = []

    def hear(self, events: control_channel.Events) -> None:
        for event in events:
            if isinstance(event, control_channel.StatesBegun):
                layers = kv_states_for(
                    self._adapter.model, self._adapter.margin, self._adapter.kept, self._adapter.kernels
                )
                self._rows, self._mixed = FollowerBatchState(layers, event.windows, self._adapter.live), event.mixed
                if self._kept is not None:
                    self._pieces = FollowerPieces(self._rows, self._kept.codec, self._files)
                continue
            assert self._rows is not None, "something happened before anything began"
            if isinstance(event, control_channel.ForwardPass):
                self._pass(self._rows, event)
            elif isinstance(event, control_channel.PieceEvent):
                assert self._pieces is not None, "this rank has no records outside of pages"
                if not isinstance(event, PASS_INDEPENDENT):
                    self.settle()
                self._pieces.hear(event)
            else:
                self._rows.hear(event)

    @property
    def has_questions(self) -> bool:
        """Whether something is to be answered."""
        return self._files is not None and self._files.busy

    def answers(self) -> list[control_channel.FollowerAnswer]:
        """To what it was asked, as far as it is known now."""
        return [] if self._pieces is None else [*self._pieces.answers()]

    def settle(self) -> None:
        """Wait for the pass under way."""
        mx.eval(self._running)
        self._running = []

    def _pass(self, rows: FollowerBatchState, told: control_channel.ForwardPass) -> None:
        tokens = broadcast_tokens(mx.zeros(told.tokens, mx.uint32), self._group)
        mx.async_eval(tokens)
        adapter = self._adapter
        logits = run_forward(
            adapter.model, adapter.selection, rows, tokens, rows.parts(told), told.at, mixed=self._mixed
        )
        self.settle()  # one pass ahead, and no more
        self._running = [logits, *rows.pending()]
        mx.async_eval(self._running)
        if adapter.device.kind == "cpu":
            self.settle()


def run_follower(settings: Settings, folder: Path, where: RankPlace, on_step: OnStep) -> None:
    """Load this rank's share of the model in `folder`, and do what rank 0 says until it needs nobody any more. What
    goes wrong is the last that it hears. `on_step` is given 0 when it is loaded, then each pass's
    number."""
    joined = join_group(settings, where)
    [link] = joined.links
    try:
        here = device.current_device()
        native.use_one_path(settings.deterministic)
        total = joined.memory_budget(here, settings.memory)
        adapter = joined.load(folder, here, settings)
        kept = joined.kept_form(adapter, settings)
        files = _open_files(settings, adapter, folder, kept, joined.sharing)
        device.limit_memory(here, total, MLX_CACHE_PERCENT * total // 100)
        share = RankShare.of(adapter, total, {} if kept is None else kept.sizes)
        link.send(FrameKind.SHARE, msgspec.msgpack.encode(share))
        on_step(0)
        _follow_events(Follower(adapter, joined.sharing.group, kept, files), link, on_step)
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
    settings: Settings, adapter: ModelAdapter, folder: Path, kept: RankRecordForm | None, sharing: ModelSharding
) -> FollowerFiles | None:
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    disk = open_disk_cache(settings, adapter, folder, codec, sharing.part)
    return None if disk is None or kept is None else FollowerFiles(disk, kept.form)


def _follow_events(follower: Follower, link: Link, on_step: OnStep) -> None:
    while (frame := _next_frame(follower, link)).kind == FrameKind.TOLD:
        follower.hear(control_channel.decode_events(frame.body))
        on_step(frame.step)
    follower.settle()


def _next_frame(follower: Follower, link: Link) -> LinkFrame:
    """What rank 0 says next. What it has asked for is answered meanwhile, as it is found."""
    while follower.has_questions:
        for answer in follower.answers():
            link.send(FrameKind.ANSWER, control_channel.encode_answer(answer))
        with suppress(LinkLate):
            return link.receive(LOOK_S)
    return link.receive()


class MirroredSlots(PageSlots):
    """Rank 0 counts who has which; here is known what it said of those that nobody does."""

    def let_go(self, free: Sequence[int]) -> None:
        self._free = list(free)


class MirroredForms(PageForms):
    """Rows are told where their pages lie, so that any page lies at its own number."""

    def reach(self, slots: int) -> None:
        """There are so many, in some pool."""
        for places in (self.raw_of, self.coded_of):
            places.extend(range(len(places), slots))


class MirroredTable(PageTable):
    """The pages of a row, as it was told. Whether they are anybody's is rank 0's to know."""

    def __init__(self, pages: PageAllocator) -> None:
        super().__init__(pages)

    def release(self) -> None:
        self.numbers = array("i")

    def rewind(self, length: int) -> None:
        """What is left is told with the next pass."""

    def forget(self, oldest: int) -> None:
        """The same."""


class FollowerBatchState(BatchState):
    """Live states that change as they are told to."""

    def __init__(
        self, layers: list[LayerState], windows: Sequence[control_channel.Window], codec: PairCodec | None
    ) -> None:
        super().__init__(layers, codec=codec, windows=windows)
        self._pools = numbered_pools(self.groups)
        for group in self.groups:
            group.pages = PageAllocator(None if group.coded is None else MirroredForms())
        for pool in self._pools:
            pool.slots = MirroredSlots()
        self._seated: dict[int, Row] = {}  # by slot
        self._checkpoints: dict[int, StateCheckpoint] = {}
        self._told: control_channel.ForwardPass | None = None

    def hear(self, event: control_channel.StateEvent) -> None:
        """Something happened, other than a pass."""
        match event:
            case control_channel.SlotsResized(slots):
                self._resize(slots)
            case control_channel.RowLeft(slot):
                self._seated.pop(slot, None)
            case control_channel.CheckpointTaken(number, slot):
                copies = self.checkpoint(self._seat(slot))
                if copies is not None:
                    self._checkpoints[number] = copies
            case control_channel.CheckpointResumed(number, slot):
                if number in self._checkpoints:
                    self.resume(self._seat(slot), self._checkpoints[number])
            case control_channel.CheckpointDropped(number):
                self._checkpoints.pop(number, None)
            case control_channel.RowRewound(slot, length):
                self.rewind(self._seat(slot), length)
            case control_channel.PoolsTrimmed(pools):
                for pool, (slabs, free) in zip(self._pools, pools, strict=True):
                    assert isinstance(pool.slots, MirroredSlots)
                    pool.slots.let_go(array("i", free))
                    pool.keep(slabs)
            case control_channel.PagesMoved(slabs, copies):
                self._grow(slabs)
                for number, told in copies:
                    self._copied(self.groups[number], told)
            case control_channel.PagesEncoded(number, raw, coded):
                self.groups[number].encode_slots(array("i", raw), array("i", coded))

    def recall(self, number: int, checkpoint: StateCheckpoint | None) -> None:
        """A checkpoint, which this rank may have nothing of, was read from a file."""
        if checkpoint is not None:
            self._checkpoints[number] = checkpoint

    def recalled(self, number: int | None) -> StateCheckpoint | None:
        """What this rank has of a checkpoint."""
        return None if number is None else self._checkpoints.get(number)

    def parts(self, told: control_channel.ForwardPass) -> list[ForwardPart]:
        """Of a pass, which is launched next."""
        self._told = told
        return [
            ForwardPart(
                tuple(self._standing(row) for row in part.rows),
                part.width,
                None if part.stated is None else mx.array(part.stated),
                tentative=part.tentative,
            )
            for part in told.parts
        ]

    def provide(self, pool: PagePool[Any]) -> None:
        """What there is memory for is told."""

    def _standing(self, told: control_channel.RowPlan) -> Row:
        row = self._seat(told.slot)
        row.length, row.position = told.length, told.position
        for number, first, slots, coded in told.tables:
            table = row.tables[number]
            table.first, table.numbers, table.coded = first, array("i", slots), coded
        return row

    def _seat(self, slot: int) -> Row:
        if slot not in self._seated:
            self._seated[slot] = Row(slot, tuple(MirroredTable(group.pages) for group in self.groups))
        return self._seated[slot]

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        assert self._told is not None
        return self._told.earlier

    def _make_room(self, launches: Sequence[ForwardBatch]) -> None:
        """It is there: what it takes is told before a pass is."""

    def _encode(self, launches: Sequence[ForwardBatch]) -> None:
        """What is due was told before the pass."""

    def _grow(self, slabs: Sequence[tuple[int, Sequence[int]]]) -> None:
        for number, pages in slabs:
            self._pools[number].grow_like(pages)
        for group in self.groups:
            if isinstance(group.pages.forms, MirroredForms):
                group.pages.forms.reach(max(sum(pool.slabs) for pool in group.pools))

    def _copied(self, group: PageGroup, copies: Sequence[tuple[int, int, int, bool]]) -> None:
        if group.storages:
            group.copy([PageCopy(*copy) for copy in copies])


class FollowerPieces:
    """Of live states that begin anew when these do. Whoever calls has the pass under way computed first."""

    def __init__(self, rows: FollowerBatchState, codec: DeltaCodec | None, files: FollowerFiles | None) -> None:
        """Without a codec, pieces are as they lie in pages."""
        self._rows, self._codec, self._files = rows, codec, files
        self._held: dict[int, LayerDeltas] = {}
        self._read: dict[int, StateCheckpoint | None] = {}  # what came with a piece from its file

    def hear(self, event: control_channel.PieceEvent) -> None:
        match event:
            case control_channel.PieceMade(number, extents):
                self._keep(number, self._unpage_piece([_decode_extent(*each) for each in extents]))
            case control_channel.PieceCut(number, made, begin, end, whole):
                piece = self._held[number]
                piece = piece if end is None else piece.before(end, whole)
                piece = piece if begin is None else piece.behind(begin, whole)
                self._keep(made, piece.copied())
            case control_channel.PiecePlaced(number, place, coded, held, runs):
                self._place(self._held[number], place, KVPlacement(array("i", coded), held, runs))
            case control_channel.CheckpointRecalled(number, checkpoint):
                self._rows.recall(checkpoint, self._read[number])
            case control_channel.PieceReleased(number):
                self._held.pop(number, None)
                self._read.pop(number, None)
                if self._files is not None:
                    self._files.cancel(number)
            case _:
                assert self._files is not None, "this rank has no files"
                self._file(self._files, event)

    def answers(self) -> Iterator[control_channel.FollowerAnswer]:
        """To what was asked before."""
        if self._files is None:
            return
        yield from self._files.written()
        for number, record in self._files.read():
            if record is not None:
                self._keep(number, record.deltas)
                self._read[number] = record.checkpoint
            yield control_channel.FollowerAnswer(number, good=record is not None)

    def _file(self, files: FollowerFiles, event: control_channel.PieceEvent) -> None:
        match event:
            case control_channel.PieceFiled():
                files.file(event, self._held[event.number], self._rows.recalled(event.checkpoint))
            case control_channel.PieceFetched():
                files.fetch(event)
            case control_channel.FilesUsed(used):
                files.use(used)
            case control_channel.TenantForgotten(tenant):
                files.forget(tenant)

    def _unpage_piece(self, extents: list[KVExtent]) -> LayerDeltas:
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
        self._held[number] = piece


def _decode_extent(begin: int, end: int, places: bytes) -> KVExtent:
    return KVExtent(begin, end, array("i", places))


log = logging.getLogger("ingot.cache")


@dataclass(frozen=True, slots=True)
class _FollowerRead:
    reading: PendingRead
    checkpoint: bool


class FollowerFiles:
    """Owns the disk. For the thread that follows."""

    def __init__(self, disk: DiskBackend, form: RecordForm) -> None:
        """`form` is that of this rank's part of a record, as it is written."""
        self._disk, self._form = disk, form
        self._readings: dict[int, _FollowerRead] = {}
        self._writing: dict[int, DiskEntry] = {}
        self._refused: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether there is something that will be answered."""
        return bool(self._readings or self._writing or self._refused)

    def fetch(self, event: control_channel.PieceFetched) -> None:
        entry = self._find(event.file)
        if entry is None:
            self._refused.append(event.number)
        else:
            self._readings[event.number] = _FollowerRead(self._disk.reader.ask(entry), event.checkpoint)

    def file(self, event: control_channel.PieceFiled, deltas: LayerDeltas, checkpoint: StateCheckpoint | None) -> None:
        loose = UnpagedRecord(event.file.begin, event.file.begin + len(event.tokens), deltas, checkpoint)
        header = RecordHeader(
            self._disk.store.key,
            _record_owner(event.file),
            event.before,
            event.file.path,
            "",  # nobody looks for a file here but by its name
            tuple(event.oldest),
            describe_record(loose, tuple(event.tokens), landmark=event.landmark),
            variant=event.file.variant,
        )
        entry = self._disk.writer.offer(header, tuple(serialise_record(loose)))
        if entry is None:
            self._refused.append(event.asked)
        else:
            self._writing[event.asked] = entry

    def use(self, files: list[control_channel.FileRef]) -> None:
        found = (self._find(file) for file in files)
        self._disk.store.touch([entry for entry in found if entry is not None])

    def cancel(self, number: int) -> None:
        """Nobody waits for a piece any more."""
        asked = self._readings.pop(number, None)
        if asked is not None:
            asked.reading.cancel()

    def forget(self, tenant: str) -> None:
        """Beside the steps: what is being written is waited for."""
        threading.Thread(target=self._forget, args=(tenant,), name="ingot-disk-clearing").start()

    def written(self) -> Iterator[control_channel.FollowerAnswer]:
        """What has come of files that were to be written, and of what could not even be begun."""
        refused, self._refused = self._refused, []
        yield from (control_channel.FollowerAnswer(number, good=False) for number in refused)
        for number, entry in [*self._writing.items()]:
            if self._disk.writer.find(entry.name) is not entry:
                del self._writing[number]
                yield control_channel.FollowerAnswer(number, good=not entry.lost)

    def read(self) -> Iterator[tuple[int, UnpagedRecord | None]]:
        """What has come of those that were to be read, by number."""
        for number, asked in [*self._readings.items()]:
            if asked.reading.done:
                del self._readings[number]
                yield number, self._opened(asked)

    def close(self, within_s: float) -> None:
        self._disk.close(within_s)

    def _find(self, file: control_channel.FileRef) -> DiskEntry | None:
        whose = record_identity(self._disk.store.key, _record_owner(file), file.path, file.begin)
        return self._disk.find(record_file_name(whose, file.variant))

    def _opened(self, asked: _FollowerRead) -> UnpagedRecord | None:
        """None where it is lost, or not what rank 0 takes it for."""
        found = asked.reading.found
        if found is None:
            return None
        try:
            record = fit_record(deserialise_record(found.header.record, found.tensors), self._form)
        except IngotError as error:
            log.warning("%s: %s", asked.reading.entry.name, error.message)
            asked.reading.entry.lost = True
            return None
        lacking = asked.checkpoint and self._form.sample.checkpoint is not None and record.checkpoint is None
        return None if lacking else record

    def _forget(self, tenant: str) -> None:
        try:
            self._disk.forget(tenant)
        except OSError as error:
            log.error("what is kept in %s cannot be removed: %s", self._disk.store.folder, error)


def _record_owner(file: control_channel.FileRef) -> RecordOwner:
    return RecordOwner(file.tenant, file.salt)

"""What a rank that follows has of records outside of pages: made, cut, written, read and put back as it is told."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import mlx.core as mx

from ingot.cache.checkpoint import Checkpoint
from ingot.cache.delta_codec import DeltaCodec
from ingot.cache.deltas import Deltas
from ingot.cache.kv_deltas import Berth, Extent, layers_of, raw_delta, read, stored_delta
from ingot.distributed import control_channel
from ingot.distributed.follower import FollowingRows
from ingot.ranks.following_files import FollowingFiles


class FollowingPieces:
    """Of live states that begin anew when these do. Whoever calls has the pass under way computed first."""

    def __init__(self, rows: FollowingRows, codec: DeltaCodec | None, files: FollowingFiles | None) -> None:
        """Without a codec, pieces are as they lie in pages."""
        self._rows, self._codec, self._files = rows, codec, files
        self._held: dict[int, Deltas] = {}
        self._read: dict[int, Checkpoint | None] = {}  # what came with a piece from its file

    def hear(self, event: control_channel.PieceEvent) -> None:
        match event:
            case control_channel.Loosened(number, extents):
                self._keep(number, self._loosened([_extent(*each) for each in extents]))
            case control_channel.Cut(number, made, begin, end, whole):
                piece = self._held[number]
                piece = piece if end is None else piece.before(end, whole)
                piece = piece if begin is None else piece.behind(begin, whole)
                self._keep(made, piece.copied())
            case control_channel.Placed(number, place, coded, held, runs):
                self._place(self._held[number], place, Berth(array("i", coded), held, runs))
            case control_channel.Recalled(number, checkpoint):
                self._rows.recall(checkpoint, self._read[number])
            case control_channel.Released(number):
                self._held.pop(number, None)
                self._read.pop(number, None)
                if self._files is not None:
                    self._files.cancel(number)
            case _:
                assert self._files is not None, "this rank has no files"
                self._file(self._files, event)

    def answers(self) -> Iterator[control_channel.Answer]:
        """To what was asked before."""
        if self._files is None:
            return
        yield from self._files.written()
        for number, record in self._files.read():
            if record is not None:
                self._keep(number, record.deltas)
                self._read[number] = record.checkpoint
            yield control_channel.Answer(number, good=record is not None)

    def _file(self, files: FollowingFiles, event: control_channel.PieceEvent) -> None:
        match event:
            case control_channel.Filed():
                files.file(event, self._held[event.number], self._rows.recalled(event.checkpoint))
            case control_channel.Fetched():
                files.fetch(event)
            case control_channel.Used(used):
                files.use(used)
            case control_channel.Forgotten(tenant):
                files.forget(tenant)

    def _loosened(self, extents: list[Extent]) -> Deltas:
        if self._codec is None:
            return read(self._rows.states, extents, stored_delta)
        return self._codec.encode(read(self._rows.states, extents, raw_delta))

    def _place(self, piece: Deltas, number: int, berth: Berth) -> None:
        group = self._rows.groups[number]
        raw = piece if self._codec is None else self._codec.decode(piece, layers_of(self._rows.states, group))
        self._rows.lay(group, raw, berth)
        mx.eval(self._rows.pending())

    def _keep(self, number: int, piece: Deltas) -> None:
        mx.eval(piece.arrays())
        self._held[number] = piece


def _extent(begin: int, end: int, places: bytes) -> Extent:
    return Extent(begin, end, array("i", places))

"""What rank 0 tells, and what is made of it."""

from __future__ import annotations

import socket

import mlx.core as mx
import pytest

from ingot.cache.kv_deltas import KVDelta, LayerDeltas, StateCheckpoint
from ingot.cache.kv_storage import SlabStorage
from ingot.cache.page_groups import PageGroup
from ingot.distributed import control_channel
from ingot.distributed.control_channel import ControlChannel, FrameKind
from ingot.distributed.group import GroupTotals, RankShare
from ingot.distributed.leader_state import EncodedSizing, SharedCheckpoint, SharedDeltas, SharedPiece
from ingot.distributed.wire import Link
from ingot.errors import Unavailable


@pytest.fixture
def ends() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours, "rank 1"), Link(theirs, "rank 0")


def test_every_event_is_read_as_it_was_written() -> None:
    row = control_channel.RowPlan(3, 130, 130, [(0, 0, b"\x01\x00\x00\x00", 1)])
    events = [
        control_channel.BatchStateCreated([None, 12], mixed=True),
        control_channel.SlotsResized(4),
        control_channel.RowRemoved(2),
        control_channel.CheckpointMade(7, 1),
        control_channel.CheckpointResumed(7, 2),
        control_channel.CheckpointDropped(7),
        control_channel.RowRewound(3, 129),
        control_channel.PoolsTrimmed([(1, b"")]),
        control_channel.PagesMoved([(0, [4])], [(0, [(1, 2, 3, False)])]),
        control_channel.PagesEncoded(0, b"\x01\x00\x00\x00", b"\x00\x00\x00\x00"),
        control_channel.PieceMade(8, [(0, 130, b"\x01\x00\x00\x00")]),
        control_channel.PieceCut(8, 9, None, 64, 0),
        control_channel.PiecePlaced(9, 0, b"", 0, [(0, 64, 3, 0)]),
        control_channel.PieceReleased(9),
        control_channel.ForwardPass(
            [control_channel.PartPlan([row], 1, 0), control_channel.PartPlan([row], 2, 0, [5, 9])], 3, [0], 0
        ),
    ]
    assert control_channel.decode_events(control_channel.encode_events(events)) == events


def test_what_was_noted_goes_out_with_what_is_told_next_in_order(ends: tuple[Link, Link]) -> None:
    channel = ControlChannel([ends[0]])
    channel.queue(control_channel.RowRemoved(1))
    channel.send(control_channel.ForwardPass([], 1, None, 0))
    frame = ends[1].receive(1.0)
    assert (frame.kind, frame.step) == (FrameKind.EVENTS, 1)
    assert [type(event) for event in control_channel.decode_events(frame.body)] == [
        control_channel.RowRemoved,
        control_channel.ForwardPass,
    ]


def test_a_checkpoint_that_nobody_holds_is_dropped_everywhere(ends: tuple[Link, Link]) -> None:
    channel = ControlChannel([ends[0]])
    checkpoint = SharedCheckpoint(StateCheckpoint([(mx.zeros(3),)]))
    checkpoint.number, checkpoint.size, checkpoint.channel = channel.number(), 100, channel
    assert checkpoint.nbytes == 100
    del checkpoint
    channel.send(control_channel.RowRemoved(0))
    assert control_channel.decode_events(ends[1].receive(1.0).body)[0] == control_channel.CheckpointDropped(0)


def test_what_is_cut_here_is_cut_everywhere_and_let_go_of_with_the_last_who_holds_it(ends: tuple[Link, Link]) -> None:
    channel = ControlChannel([ends[0]])
    keys = mx.zeros((1, 2, 10, 4))
    sizing = EncodedSizing([(0, (100, 7))])
    whole = SharedDeltas.of(LayerDeltas([KVDelta(0, 10, (keys, keys)), None]), SharedPiece(channel), sizing)
    first, second = whole.split(4, 0)
    assert (whole.nbytes, first.nbytes, second.nbytes) == (170, 128, 142)
    copy = first.copied()
    del whole, first, second
    channel.send(control_channel.RowRemoved(0))
    events = control_channel.decode_events(ends[1].receive(1.0).body)
    assert events[:2] == [control_channel.PieceCut(0, 1, None, 4, 0), control_channel.PieceCut(0, 2, 4, None, 0)]
    assert {event.number for event in events if isinstance(event, control_channel.PieceReleased)} == {0, 2}
    del copy
    channel.send(control_channel.RowRemoved(0))
    assert control_channel.decode_events(ends[1].receive(1.0).body)[0] == control_channel.PieceReleased(1)


def test_the_last_words_of_a_follower_are_what_requests_end_with(ends: tuple[Link, Link]) -> None:
    channel = ControlChannel([ends[0]])
    ends[1].send(FrameKind.FAILED, b"rank 1: no memory")
    ends[1].close()
    with pytest.raises(Unavailable, match="rank 1: no memory"):
        for _ in range(100):  # the first may still find room in the socket
            channel.send(control_channel.RowRemoved(0))
    assert "no memory" in channel.trouble
    with pytest.raises(Unavailable, match="lost each other"):
        channel.send(control_channel.RowRemoved(0))


def test_a_pass_that_fails_after_it_was_told_is_the_end(ends: tuple[Link, Link]) -> None:
    channel = ControlChannel([ends[0]])
    with pytest.raises(ValueError, match="broken"), channel.computing():
        raise ValueError("broken")
    with pytest.raises(Unavailable):
        channel.send(control_channel.RowRemoved(0))


def test_what_fits_into_the_whole_fits_on_every_rank() -> None:
    common = {"activation": 1, "score": 2, "logits": 3, "scratch": 0, "gathered": (0, 0, 0, 0), "coded": 5, "vocab": 9}
    first = RankShare(
        groups=[(None, 10)],
        recurrent=0,
        tile=32,
        ragged=True,
        mixed=True,
        spare=500,
        encoded=[(None, 8, 5)],
        **common,
    )
    second = RankShare(
        groups=[(12, 7), (None, 20)],
        recurrent=64,
        tile=None,
        ragged=True,
        mixed=False,
        spare=400,
        encoded=[(12, 4, 3), (None, 6, 9)],
        **common,
    )
    whole = GroupTotals.of([first, second])
    assert whole.footprint.groups == ((None, 20), (12, 7))
    assert (whole.footprint.recurrent, whole.footprint.coded, whole.footprint.tile) == (64, 5, None)
    assert whole.spare == 400
    assert whole.ragged and not whole.mixed and not whole.rewinds
    assert whole.encoded == {None: (8, 9), 12: (4, 3)}
    assert not whole.forgets and GroupTotals.of([second, first]).forgets


def test_slabs_become_those_of_another_pool() -> None:
    group = PageGroup(0, None)
    group.grow_like([4, 4])
    storage = SlabStorage(group, 1, (8, 8), mx.float32)
    storage.provide()
    storage.keys[1][0] = 5.0
    group.grow_like([8, 2])
    storage.provide()
    assert [slab.shape[0] for slab in storage.keys] == [8, 2]
    assert storage.keys[0][4, 0, 0, 0].item() == 5.0
    group.keep(1)
    assert len(storage.keys) == 1 and group.slabs == [8]

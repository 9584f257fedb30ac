"""What describing a step to the other ranks costs rank 0: time and bytes, relative to a process without followers.

    python -m bench.ranks telling [--rows 8] [--tokens 4096] [--steps 1000] [--followers 1]

Followers are processes on this machine that read messages and compute nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Sequence

import mlx.core as mx

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import BatchState
from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.distributed.control_channel import ControlChannel, FrameKind
from ingot.distributed.leader_state import LeaderBatchState
from ingot.distributed.wire import Link

WHOLE = Footprint(groups=((None, 1024),), recurrent=0, activation=0, score=0, logits=0)


def follower() -> tuple[Link, int]:
    """A link to a process that reads, and a pipe's end that says how many bytes it read when it was told the end."""
    ours, theirs = socket.socketpair()
    said, says = os.pipe()
    if os.fork():
        theirs.close()
        os.close(says)
        return Link(ours, "follower"), said
    ours.close()
    link, read = Link(theirs, "rank 0"), 0
    while (frame := link.receive()).kind == FrameKind.EVENTS:
        read += len(frame.body)
    os.write(says, str(read).encode())
    os._exit(0)


def steps(rows: BatchState, seated: list[Row], count: int) -> list[float]:
    """Seconds of each step that decodes all rows."""
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        launch(rows, [ForwardPart(tuple(seated), 1)], len(seated))
        spent.append(time.perf_counter() - began)
    return spent


def launch(rows: BatchState, parts: list[ForwardPart], tokens: int) -> None:
    if isinstance(rows, LeaderBatchState):
        with rows.passing(mx.zeros(tokens, mx.int32), range(tokens)), rows.launch(parts):
            return
    with rows.launch(parts):
        return


def begun(rows: BatchState, count: int, tokens: int) -> list[Row]:
    seated = [rows.new() for _ in range(count)]
    for row in seated:
        launch(rows, [ForwardPart((row,), tokens)], 1)
    return seated


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "bench.ranks telling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rows", 8), ("tokens", 4096), ("steps", 1000), ("followers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    followers = [follower() for _ in range(asked.followers)]
    voice = ControlChannel([link for link, _ in followers])
    told = LeaderBatchState([], (), WHOLE, voice, None, 0, None, mixed=True)
    plain = BatchState([], windows=[None])
    each = [(rows, begun(rows, asked.rows, asked.tokens)) for rows in (told, plain)]
    leading, alone = (steps(rows, seated, asked.steps) for rows, seated in each)
    voice.end()
    read = int(os.read(followers[0][1], 64))
    medians = [1000 * statistics.median(spent) for spent in (leading, alone)]
    late = 1000 * sorted(leading)[int(0.99 * len(leading))]
    passes = asked.steps + asked.rows
    print(f"{asked.rows} rows of {asked.tokens} tokens and more, {asked.followers} followers")
    print(f"a step without followers: {medians[1]:.3f} ms; with followers: {medians[0]:.3f} ms (p99 {late:.3f})")
    print(f"control channel: {medians[0] - medians[1]:.3f} ms and {read / passes:.0f} bytes per step")

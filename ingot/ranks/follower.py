"""Every rank but 0: no scheduler, no prefixes, no sampling. Does to its share of the live states what it is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import RecordCodec
from ingot.config import Settings
from ingot.distributed import control_channel
from ingot.distributed.control_channel import Kind
from ingot.distributed.follower import FollowingRows
from ingot.distributed.group import Share
from ingot.distributed.place import Place
from ingot.distributed.wire import Frame, Link, LinkLate, LinkLost
from ingot.kernels import device, native
from ingot.models.adapter import Adapter
from ingot.models.forward import run
from ingot.models.kept_files import open_disk
from ingot.models.live_states import live_states
from ingot.models.parallelism import Sharing
from ingot.ranks.following_files import FollowingFiles
from ingot.ranks.following_pieces import FollowingPieces
from ingot.ranks.joining import KeptForm, join_group
from ingot.ranks.leader import shared_tokens

KEPT_SHARE: Final = 10
"""Percent of its memory that mlx may keep of what passes gave back."""
CLOSING_S: Final = 4.0
"""How long a rank that is not needed any more goes on writing."""
LOOK_S: Final = 0.005
"""How often it looks whether files are read or written, while some are to be."""
TIMELESS: Final = (control_channel.Released, control_channel.Fetched, control_channel.Used, control_channel.Forgotten)
"""What has nothing to do with the states that a pass under way computes."""
MOST_WORDS: Final = 2000
"""Characters of what went wrong."""
OnStep = Callable[[int], None]


class Follower:
    """A share of a model, and whoever says what is done with it. Only one thread may call it."""

    def __init__(
        self, adapter: Adapter, group: Any, kept: KeptForm | None = None, files: FollowingFiles | None = None
    ) -> None:
        self._adapter, self._group, self._kept, self._files = adapter, group, kept, files
        self._rows: FollowingRows | None = None
        self._pieces: FollowingPieces | None = None
        self._mixed = False
        self._running: list[mx.array] = []

    def hear(self, events: control_channel.Events) -> None:
        for event in events:
            if isinstance(event, control_channel.Begun):
                layers = live_states(
                    self._adapter.model, self._adapter.margin, self._adapter.kept, self._adapter.kernels
                )
                self._rows, self._mixed = FollowingRows(layers, event.windows, self._adapter.live), event.mixed
                if self._kept is not None:
                    self._pieces = FollowingPieces(self._rows, self._kept.codec, self._files)
                continue
            assert self._rows is not None, "something happened before anything began"
            if isinstance(event, control_channel.Pass):
                self._pass(self._rows, event)
            elif isinstance(event, control_channel.PieceEvent):
                assert self._pieces is not None, "this rank has no records outside of pages"
                if not isinstance(event, TIMELESS):
                    self.settle()
                self._pieces.hear(event)
            else:
                self._rows.hear(event)

    @property
    def is_asked(self) -> bool:
        """Whether something is to be answered."""
        return self._files is not None and self._files.busy

    def answers(self) -> list[control_channel.Answer]:
        """To what it was asked, as far as it is known now."""
        return [] if self._pieces is None else [*self._pieces.answers()]

    def settle(self) -> None:
        """Wait for the pass under way."""
        mx.eval(self._running)
        self._running = []

    def _pass(self, rows: FollowingRows, told: control_channel.Pass) -> None:
        tokens = shared_tokens(mx.zeros(told.tokens, mx.uint32), self._group)
        mx.async_eval(tokens)
        adapter = self._adapter
        logits = run(adapter.model, adapter.selection, rows, tokens, rows.parts(told), told.at, mixed=self._mixed)
        self.settle()  # one pass ahead, and no more
        self._running = [logits, *rows.pending()]
        mx.async_eval(self._running)
        if adapter.device.kind == "cpu":
            self.settle()


def follow(settings: Settings, folder: Path, where: Place, on_step: OnStep) -> None:
    """Load this rank's share of the model in `folder`, and do what rank 0 says until it needs nobody any more. What
    goes wrong is the last that it hears. `on_step` is given 0 when it is loaded, then each pass's
    number."""
    joined = join_group(settings, where)
    [link] = joined.links
    try:
        here = device.current()
        native.use_one_path(settings.deterministic)
        total = joined.memory_budget(here, settings.memory)
        adapter = joined.load(folder, here, settings)
        kept = joined.kept_form(adapter, settings)
        files = _files(settings, adapter, folder, kept, joined.sharing)
        device.bound_memory(here, total, KEPT_SHARE * total // 100)
        share = Share.of(adapter, total, {} if kept is None else kept.sizes)
        link.send(Kind.SHARE, msgspec.msgpack.encode(share))
        on_step(0)
        _obey(Follower(adapter, joined.sharing.group, kept, files), link, on_step)
        if files is not None:
            files.close(CLOSING_S)
    except LinkLost:
        raise
    except Exception as error:
        with suppress(LinkLost, LinkLate):
            link.send(Kind.FAILED, f"rank {where.rank}: {error or type(error).__name__}"[:MOST_WORDS].encode())
        raise


def _files(
    settings: Settings, adapter: Adapter, folder: Path, kept: KeptForm | None, sharing: Sharing
) -> FollowingFiles | None:
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    disk = open_disk(settings, adapter, folder, codec, sharing.part)
    return None if disk is None or kept is None else FollowingFiles(disk, kept.form)


def _obey(follower: Follower, link: Link, on_step: OnStep) -> None:
    while (frame := _next(follower, link)).kind == Kind.TOLD:
        follower.hear(control_channel.decode(frame.body))
        on_step(frame.step)
    follower.settle()


def _next(follower: Follower, link: Link) -> Frame:
    """What rank 0 says next. What it has asked for is answered meanwhile, as it is found."""
    while follower.is_asked:
        for answer in follower.answers():
            link.send(Kind.ANSWER, control_channel.encode_answer(answer))
        with suppress(LinkLate):
            return link.receive(LOOK_S)
    return link.receive()

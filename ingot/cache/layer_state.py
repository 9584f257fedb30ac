"""What all live layer states share: the launch that they are the caches of. Only the engine thread may call anything
here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx

from ingot.cache.forward_batch import Launch, LaunchSpan, Mask, Mixed, Parted
from ingot.cache.positions import Offset

LayerKind = Literal["append", "window", "recurrent"]


class LayerState:
    """What the three kinds share: the launch that they are the caches of."""

    kind: LayerKind

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.mixed: Mixed | None = None
        self.neighbours: Sequence[Any] = ()  # all layers' states, this one among them

    @property
    def open_launch(self) -> Launch:
        assert self.launch is not None, "a layer state is used outside a launch"
        return self.launch

    @property
    def whole(self) -> Mixed | None:
        """The mixed launch that is open, unless one of its launches is being computed."""
        return self.mixed if self.launch is None else None

    @property
    def opened(self) -> Launch | Mixed:
        return self.open_launch if self.whole is None else self.whole

    @contextmanager
    def computing(self, launch: Launch) -> Iterator[None]:
        """While this is open, the state is the cache of one launch, which may be part of a mixed one."""
        self.open(launch)
        try:
            yield
        finally:
            self.close()

    def open(self, launch: Launch) -> None:
        self.launch = launch

    def close(self) -> None:
        self.launch = None

    @property
    def offset(self) -> Offset:
        return self.opened.offset

    @property
    def pieces(self) -> Sequence[LaunchSpan]:
        """The sequences that are being computed."""
        return self.opened.pieces

    def make_mask(self, width: int, return_array: bool = False, window_size: int | None = None) -> Mask | Parted:
        if self.whole is None:
            return self._mask(width, return_array, window_size)
        parts = tuple(self._mask_of(part, return_array, window_size) for part in self.whole.parts)
        return None if all(part is None for part in parts) else self._masks(parts, window_size)

    def _mask_of(self, part: Launch, return_array: bool, window_size: int | None) -> Mask:
        with self.computing(part):
            return self._mask(part.width, return_array, window_size)

    def _masks(self, parts: tuple[Mask, ...], window_size: int | None) -> Parted:
        """The masks of the launches of a mixed one."""
        assert self.whole is not None
        return Parted(self.whole, parts)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> Mask:
        """Which of its sequence's tokens each token of the open launch sees."""
        raise NotImplementedError

    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""
        raise NotImplementedError

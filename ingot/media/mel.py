"""What Whisper-like models are given of a sound: how strong each band of pitches is, every hundredth of a second."""

from __future__ import annotations

from functools import cache
from typing import Final, TypeAlias

import numpy as np

Floats: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

RATE: Final = 16_000
"""Samples a second."""
HOP: Final = 160
SPAN: Final = 400
"""Samples that one frame is made of; a frame begins every `HOP`."""
FRAMES_A_SECOND: Final = RATE // HOP
FLOOR: Final = 1e-10
RANGE: Final = 8.0
"""Powers of ten below the strongest band of a window that are told apart."""


class MelFrames:
    """Frames of a sound that comes piece by piece, the same however it is cut.

    The sound is mirrored at its beginning and followed by silence, as models are trained with.
    """

    def __init__(self, bands: int) -> None:
        self._filters, self._window = filters(bands), _hann()
        self._rest: Floats | None = None

    def push(self, samples: Floats) -> Floats:
        """The frames that these samples complete, [frames, bands]: logarithms to the base ten."""
        if self._rest is None:
            # A mirror needs a few samples; until they are there, silence stands in for them.
            mirrored = np.pad(samples[: SPAN // 2 + 1], (0, max(0, SPAN // 2 + 1 - len(samples))))[:0:-1]
            samples = np.concatenate([mirrored, samples])
        else:
            samples = np.concatenate([self._rest, samples])
        count = max(0, 1 + (len(samples) - SPAN) // HOP)
        self._rest = samples[count * HOP :]
        if not count:
            return np.zeros((0, self._filters.shape[0]), np.float32)
        spans = np.lib.stride_tricks.sliding_window_view(samples, SPAN)[::HOP][:count]
        power = np.abs(np.fft.rfft(spans * self._window)) ** 2
        return np.log10(np.maximum(power.astype(np.float32) @ self._filters.T, FLOOR)).astype(np.float32)

    def end(self) -> Floats:
        """The frames that silence after the end completes: a sound has one for each whole `HOP`."""
        return self.push(np.zeros(SPAN // 2 - HOP, np.float32))


def normalized(frames: Floats) -> Floats:
    """The frames of one window as a model is given them."""
    return (np.maximum(frames, frames.max() - RANGE) + 4.0) / 4.0


@cache
def filters(bands: int) -> Floats:
    """Which frequencies each band takes, and how much of them, [bands, frequencies]: Slaney's scale and weights."""
    edges = _frequency(np.linspace(0, _mel(RATE / 2), bands + 2))
    frequencies = np.fft.rfftfreq(SPAN, 1 / RATE)
    slopes = edges[:, None] - frequencies[None, :]
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    area = 2.0 / (edges[2:] - edges[:-2])
    return (np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]).astype(np.float32)


def _hann() -> Floats:
    """Periodic, as spectra want it."""
    return np.hanning(SPAN + 1)[:-1].astype(np.float32)


def _mel(frequency: float) -> float:
    """Even up to 1 kHz, logarithmic above."""
    return 15.0 + 27.0 * np.log(frequency / 1000.0) / np.log(6.4)


def _frequency(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels - 15.0)))

"""Frames of pitches, as Whisper models are given them."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.media.mel import FLOOR, MelFrames, filters, normalized
from tests.hearing import tone


def frames(*pieces: np.ndarray, bands: int = 80) -> np.ndarray:
    mel = MelFrames(bands)
    return np.concatenate([*(mel.push(piece) for piece in pieces), mel.end()])


def test_a_sound_has_a_frame_for_each_whole_hundredth_of_a_second() -> None:
    assert [len(frames(tone(seconds))) for seconds in (1.0, 1.005, 0.3)] == [100, 100, 30]
    assert len(frames(np.zeros(0, np.float32))) == 0


@pytest.mark.parametrize("cut", [1, 399, 1000, 7999])
def test_frames_are_the_same_however_the_sound_is_cut(cut: int) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, 8000).astype(np.float32)
    head = max(cut, 201)  # the mirror at the beginning is made of the first piece
    assert np.allclose(frames(noise[:head], noise[head:]), frames(noise), atol=1e-5)


def test_a_tone_is_loudest_in_the_band_of_its_pitch() -> None:
    heard = frames(tone(1.0))[50]
    band = int(heard.argmax())
    assert filters(80)[band, round(440 / 40)] > 0


def test_silence_is_the_floor() -> None:
    assert np.allclose(frames(np.zeros(16_000, np.float32)), np.log10(FLOOR))


@pytest.mark.parametrize("bands", [80, 128])
def test_bands_cover_the_frequencies_with_the_same_area_each(bands: int) -> None:
    made = filters(bands)
    assert made.shape == (bands, 201) and made.min() == 0
    wide = made[-10:].sum(axis=1) * 40  # in which many frequencies lie
    assert np.allclose(wide, 1.0, atol=0.05)


def test_a_window_spans_eight_powers_of_ten_at_most() -> None:
    shown = normalized(np.array([[-10.0, 1.0]], np.float32))
    assert shown.tolist() == [[-0.75, 1.25]]

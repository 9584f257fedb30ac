"""Frames of pitches, as Whisper models are given them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.audio import MEL_FLOOR, AudioFile, FloatArray, MelFrames, mel_filters, normalize_mels
from tests.hearing import tone, wav
from tests.media.clips import SAME


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
    assert mel_filters(80)[band, round(440 / 40)] > 0


def test_silence_is_the_floor() -> None:
    assert np.allclose(frames(np.zeros(16_000, np.float32)), np.log10(MEL_FLOOR))


@pytest.mark.parametrize("bands", [80, 128])
def test_bands_cover_the_frequencies_with_the_same_area_each(bands: int) -> None:
    made = mel_filters(bands)
    assert made.shape == (bands, 201) and made.min() == 0
    wide = made[-10:].sum(axis=1) * 40  # in which many frequencies lie
    assert np.allclose(wide, 1.0, atol=0.05)


def test_a_window_spans_eight_powers_of_ten_at_most() -> None:
    shown = normalize_mels(np.array([[-10.0, 1.0]], np.float32))
    assert shown.tolist() == [[-0.75, 1.25]]


av = pytest.importorskip("av")

SECONDS = 3.0
FORMS = {
    "flac": ("flac", "flac", 16_000),
    "mp3": ("mp3", "libmp3lame", 44_100),
    "m4a": ("ipod", "aac", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "aac": ("adts", "aac", 44_100),
    "wide wav": ("wav", "pcm_f32le", 192_000),
}


def encoded(container: str, codec: str, rate: int, samples: FloatArray, layout: str = "mono") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=SAME) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.rate = 16_000
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        for made in [*resampler.resample(frame), *resampler.resample(None)]:
            made.pts = None
            out.mux(stream.encode(made))
        out.mux(stream.encode(None))
    return file.getvalue()


def picture_clip(container: str = "mp4", codec: str = "mpeg4") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(5):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def webm_of_pictures() -> bytes:
    return picture_clip("webm", "libvpx")


def floating(*values: float) -> bytes:
    """A WAV file of such samples."""
    data = np.tile(np.array(values, "<f4"), 16_000).tobytes()
    told = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    chunks = b"fmt " + struct.pack("<I", len(told)) + told + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def flac_of_days() -> bytes:
    """Of three seconds, whose head says that it lasts for a month and a half."""
    whole = bytearray(encoded(*FORMS["flac"], tone(SECONDS)))
    whole[21] |= 0x0F  # 36 bits of its streaminfo count the samples
    whole[22:26] = b"\xff" * 4
    return bytes(whole)


def ogg_without_end() -> bytes:
    """Heads of one Opus stream behind another, and never a packet of sound."""
    whole = encoded(*FORMS["ogg"], tone(0.1))
    third = whole.index(b"OggS", whole.index(b"OpusTags"))
    return b"".join(whole[:14] + struct.pack("<I", serial) + whole[18:third] for serial in range(2000))


def m4a_without_index() -> bytes:
    whole = encoded(*FORMS["m4a"], tone(SECONDS))
    return whole.replace(b"moov", b"junk")


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("a.wav", wav(tone(0.1)))
    return file.getvalue()


def claiming(*, rate: int = 16_000, channels: int = 1, code: int = 1, bits: int = 16, seconds: float = 1.0) -> bytes:
    """A WAV file that says of itself what a test wants."""
    data = bytes(int(32_000 * seconds))
    block = channels * bits // 8
    told = struct.pack("<HHIIHH", code, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    chunks = b"fmt " + struct.pack("<I", len(told)) + told + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def cut(name: str, share: float) -> bytes:
    whole = encoded(*FORMS[name], tone(SECONDS))
    return whole[: int(share * len(whole))]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "one byte": lambda: b"R",
    "a zip": zipped,
    "text": lambda: b"hello, this is no sound\n" * 50,
    "a playlist": lambda: b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/secret\n",
    "a list of files": lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "noise": lambda: np.random.default_rng(1).bytes(4096).replace(b"\xff", b"\x00"),
    "noise behind a WAV head": lambda: b"RIFF\xff\xff\xff\xffWAVE" + np.random.default_rng(2).bytes(4096),
    "a WAV head alone": lambda: wav(tone(1))[:44],
    "half a WAV head": lambda: wav(tone(1))[:20],
    "half a WAV": lambda: wav(tone(10))[:160_000],
    "a WAV without samples": lambda: wav(tone(0)),
    "no samples a second": lambda: claiming(rate=0),
    "four billion samples a second": lambda: claiming(rate=0xFFFFFFFF),
    "no channels": lambda: claiming(channels=0),
    "sixty thousand channels": lambda: claiming(channels=60_000),
    "an unknown code": lambda: claiming(code=0x7ABC),
    "half a FLAC": lambda: cut("flac", 0.5),
    "half an M4A": lambda: cut("m4a", 0.5),
    "the first bytes of an Ogg": lambda: cut("ogg", 0.004),
    "a clip without sound": picture_clip,
    "a WebM without sound": webm_of_pictures,
    "text behind a WAV head": lambda: b"RIFF\x00\x10\x00\x00WAVE" + b"hello, this is no sound\n" * 200,
    "an image": lambda: b"\x89PNG\r\n\x1a\n" + bytes(500),
    "a score": lambda: b"MThd\x00\x00\x00\x06\x00\x00\x00\x01\x00\x60MTrk" + bytes(40),
    "a thousand channels": lambda: claiming(channels=1000),
    "samples of no bits": lambda: claiming(bits=0),
    "samples that are not finite numbers": lambda: floating(0.1, float("nan")),
    "samples that never end": lambda: floating(0.1, float("-inf")),
    "a FLAC that lasts for weeks": flac_of_days,
    "an Ogg of heads alone": ogg_without_end,
    "an M4A without an index": m4a_without_index,
    "an MP3 that is a tag": lambda: b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + bytes(5000),
    "an MP3 of noise": lambda: b"\xff\xfb\x90\x64" + np.random.default_rng(4).bytes(9000),
    "an AAC of noise": lambda: b"\xff\xf1\x50\x80" + np.random.default_rng(5).bytes(9000),
    "a WebM head alone": lambda: cut("webm", 0.01),
    "a FLAC of noise": lambda: cut("flac", 0.1)[:60] + np.random.default_rng(3).bytes(9000),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_browsers_phones_and_recorders_send_is_taken(name: str) -> None:
    sound = AudioFile(encoded(*FORMS[name], tone(SECONDS)))
    samples = np.concatenate(list(sound.samples()))
    assert sound.seconds == pytest.approx(SECONDS, abs=0.1)
    assert len(samples) / 16_000 == pytest.approx(SECONDS, abs=0.1)
    middle = np.abs(np.fft.rfft(samples[8000:24_000]))
    assert int(middle.argmax()) == 440  # still the same tone


def test_channels_are_mixed_into_one() -> None:
    for channels in (2, 8):
        samples = np.concatenate(list(AudioFile(wav(tone(1), channels=channels)).samples()))
        assert len(samples) == 16_000 and np.abs(samples).max() > 0.1


def test_samples_of_a_plain_file_are_its_own() -> None:
    samples = np.concatenate(list(AudioFile(wav(tone(1))).samples()))
    assert np.allclose(samples, tone(1), atol=1e-4)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_sound_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadMedia) as refused:
        sound = AudioFile(HOSTILE[name]())
        for _ in sound.samples():
            pass
    assert refused.value.status == 400 and refused.value.code == "invalid_media"
    assert "Errno" not in str(refused.value) and "<none>" not in str(refused.value)


def test_a_sound_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "AUDIO_S", 1.0)
    with pytest.raises(BadMedia, match="longer than"):
        AudioFile(wav(tone(2)))


def test_a_recording_whose_last_packet_is_cut_off_is_taken() -> None:
    whole = encoded(*FORMS["aac"], tone(SECONDS))
    assert AudioFile(whole[:-20]).seconds > SECONDS - 0.2

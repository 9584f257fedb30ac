"""Pixels as people see them, of every kind of file that may come, or a refusal in words."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from ingot.errors import BadMedia
from ingot.media.images import ImageFile
from tests.media.pictures import FORMATS, Image, drawn, file_of, saved, turned_file
from tests.media.test_images import png

ImageOps = pytest.importorskip("PIL.ImageOps")


def pixels(data: bytes) -> Any:
    [frame] = ImageFile.of(data).frames()
    return frame


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_unpacked_to_three_colours(format: str) -> None:
    found = pixels(file_of(20, 10, format))
    assert found.shape == (10, 20, 3) and found.dtype == np.uint8
    if format in ("png", "bmp"):
        assert np.array_equal(found, np.asarray(drawn(20, 10)))


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_stands_as_its_camera_was_held(format: str, orientation: int) -> None:
    data = turned_file(30, 20, orientation, format)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    found = pixels(data)
    assert found.shape[:2] == ImageFile.of(data).size[::-1]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("format", "mode"), [("jpeg", "CMYK"), ("jpeg", "L"), ("png", "P"), ("png", "1"), ("png", "LA")]
)
def test_other_colours_become_three(format: str, mode: str) -> None:
    assert pixels(saved(drawn(16, 16, mode), format)).shape == (16, 16, 3)


def test_sixteen_bits_keep_their_upper_eight() -> None:
    deep = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    found = pixels(saved(Image.fromarray(deep), "png"))
    assert np.array_equal(found[:, :, 0], deep >> 8)


def test_what_is_transparent_lies_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((1, 1), (10, 20, 30, 255))
    found = pixels(saved(clear, "png"))
    assert tuple(found[0, 0]) == (255, 255, 255) and tuple(found[1, 1]) == (10, 20, 30)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_a_truncated_file_is_refused_in_words(format: str) -> None:
    data = file_of(64, 64, format)
    with pytest.raises(BadMedia, match="cannot be unpacked"):
        pixels(data[: len(data) * 2 // 3])


def test_a_bomb_is_refused_by_its_header_before_anything_is_unpacked() -> None:
    packed = zlib.compress(bytes(1 << 24))
    with pytest.raises(BadMedia, match="Send it smaller"):
        ImageFile.of(png(60_000, 60_000, (b"IDAT", packed), (b"IEND", b"")))


def test_more_data_than_the_header_says_is_not_unpacked() -> None:
    packed = zlib.compress(bytes(1 << 24))
    assert pixels(png(4, 4, (b"IDAT", packed), (b"IEND", b""))).shape == (4, 4, 3)


def test_a_file_that_says_two_sizes_is_refused() -> None:
    data = bytearray(turned_file(16, 16, 1, "webp"))
    at = data.index(b"VP8X") + 12
    data[at : at + 3] = struct.pack("<I", 99)[:3]
    with pytest.raises(BadMedia):
        pixels(bytes(data))


def test_the_same_bytes_have_the_same_digest_and_no_others() -> None:
    one, other = file_of(8, 8), file_of(8, 9)
    assert ImageFile.of(one).digest == ImageFile.of(one).digest != ImageFile.of(other).digest

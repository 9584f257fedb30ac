"""Sizes are read off the headers of real files by a worker, and hostile ones are refused by name."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.images import ImageFile, ImageHeader
from ingot.media.layout import Size
from tests.media.pictures import FORMATS, Image, drawn, file_of, saved, turned_file

SIDES = st.integers(1, 40)


def picture_header(data: bytes) -> ImageHeader:
    return ImageFile.of(data).header


@pytest.mark.parametrize("format", FORMATS)
@given(width=SIDES, height=SIDES)
def test_the_size_is_what_was_saved(format: str, width: int, height: int) -> None:
    header = picture_header(file_of(width, height, format))
    assert (header.format, header.shown, header.orientation) == (format, (width, height), 1)


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("webp", "RGB", {"lossless": True}),
        ("webp", "RGBA", {"quality": 50}),
        ("jpeg", "RGB", {"progressive": True}),
        ("jpeg", "L", {}),
        ("jpeg", "CMYK", {}),
        ("png", "P", {}),
        ("png", "1", {}),
        ("bmp", "P", {}),
    ],
)
def test_every_variety_of_a_format_is_read(format: str, mode: str, options: dict[str, object]) -> None:
    assert picture_header(saved(drawn(33, 21, mode), format, **options)).shown == (33, 21)


def test_an_old_bmp_and_one_from_the_top_are_read() -> None:
    pixels = bytes(96 * 17)
    old = b"BM" + struct.pack("<IIIIHHHH", 26 + len(pixels), 0, 26, 12, 31, 17, 1, 24) + pixels
    upright = bytearray(file_of(31, 17, "bmp"))
    upright[22:26] = struct.pack("<i", -17)
    assert picture_header(old).shown == picture_header(bytes(upright)).shown == (31, 17)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_has_the_size_that_people_see(format: str, orientation: int) -> None:
    header = picture_header(turned_file(30, 20, orientation, format))
    assert header.orientation == orientation
    assert header.shown == ((20, 30) if orientation >= 5 else (30, 20))
    assert header.stored == (30, 20)


@pytest.mark.parametrize("told", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"XX" * 40])
def test_unreadable_exif_leaves_a_picture_as_it_lies(told: bytes) -> None:
    plain = file_of(30, 20, "jpeg")
    segment = b"Exif\0\0" + told
    made = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + plain[2:]
    assert picture_header(made).shown == (30, 20)


@pytest.mark.parametrize("format", ["gif", "webp", "png"])
def test_animated_pictures_are_refused_by_name(format: str) -> None:
    frames = [drawn(8, 8), Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")]
    film = saved(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(BadMedia, match="animated"):
        picture_header(film)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\n<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"II*\0" + bytes(20), "TIFF"),
        (b"\0\0\0\x1cftypavif" + bytes(20), "AVIF"),
        (b"\0\0\0\x1cftypheic" + bytes(20), "HEIC"),
        (b"", "empty"),
        (b"hello", "not an image of a known format"),
    ],
)
def test_what_is_no_picture_is_called_what_it_is(data: bytes, said: str) -> None:
    with pytest.raises(BadMedia, match=said) as refused:
        picture_header(data)
    assert "PNG, JPEG, WebP, GIF and BMP" in refused.value.message


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))
        for name, held in (head, *chunks)
    )


IDAT = (b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize(("width", "height"), [(2**31 - 1, 1), (60_000, 60_000), (70_000, 1000)])
def test_a_picture_of_too_much_is_refused_by_its_size(width: int, height: int) -> None:
    with pytest.raises(BadMedia, match=f"{width} by {height} pixels"):
        picture_header(png(width, height, IDAT))


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_a_picture_of_nothing_is_refused(width: int, height: int) -> None:
    with pytest.raises(BadMedia, match="not an image"):
        picture_header(png(width, height, IDAT))


def test_a_ribbon_is_refused_and_the_widest_allowed_one_is_not() -> None:
    assert picture_header(png(bounds.ASPECT, 1, IDAT)).shown == Size(bounds.ASPECT, 1)
    with pytest.raises(BadMedia, match="longer side"):
        picture_header(png(bounds.ASPECT + 1, 1, IDAT))


@pytest.mark.parametrize(
    "data",
    [
        png(8, 8) + (struct.pack(">I", 0) + b"tEXt" + bytes(4)) * 100_000,
        b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b"\x21\xfe" + b"\x01a" * 100_000,
    ],
    ids=["png", "gif"],
)
def test_a_file_of_countless_pieces_is_refused(data: bytes) -> None:
    with pytest.raises(BadMedia):
        picture_header(data)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
def test_a_cut_file_is_read_or_refused_and_nothing_else(format: str, data: st.DataObject) -> None:
    whole = turned_file(12, 9, 6, format) if format in ("jpeg", "png", "webp") else file_of(12, 9, format)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    with suppress(BadMedia):
        assert picture_header(cut).stored == (12, 9)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
def test_a_garbled_file_is_read_or_refused_and_nothing_else(format: str, data: st.DataObject) -> None:
    garbled = bytearray(file_of(12, 9, format))
    for _ in range(data.draw(st.integers(1, 6))):
        garbled[data.draw(st.integers(0, min(len(garbled), 120) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = picture_header(bytes(garbled))
    except BadMedia:
        return
    assert 1 <= found.width * found.height <= bounds.PIXELS


@given(rest=st.binary(max_size=200))
@pytest.mark.parametrize("begin", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"BM", b""])
def test_no_bytes_break_the_reader(begin: bytes, rest: bytes) -> None:
    with suppress(BadMedia):
        picture_header(begin + rest)

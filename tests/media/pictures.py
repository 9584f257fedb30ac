"""Real picture files, made by Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

FORMATS = ("png", "jpeg", "webp", "gif", "bmp")


def drawn(width: int, height: int, mode: str = "RGB") -> Any:
    """Every pixel tells where it is."""
    picture = Image.new("RGB", (width, height))
    picture.putdata([(x * 7 % 256, y * 11 % 256, (x + y) % 256) for y in range(height) for x in range(width)])
    return picture.convert(mode)


def saved(picture: Any, format: str = "png", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


def file_of(width: int, height: int, format: str = "png", **options: Any) -> bytes:
    return saved(drawn(width, height), format, **options)


def turned_file(width: int, height: int, orientation: int, format: str = "jpeg") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(width, height, format, exif=exif)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"

"""Reading parts of a file to see how fast its drive is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.models.files import drive_speed
from ingot.models.files.drive_speed import MIB, read_speed


def test_a_file_is_read_in_order_and_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "model.safetensors", list[list[int]]()
    file.write_bytes(bytes(16 * MIB))
    own = drive_speed._read

    def noted(descriptor: int, places: list[int], size: int) -> int:
        read.append(places)
        return own(descriptor, places, size)

    monkeypatch.setattr(drive_speed, "_read", noted)
    assert (read_speed(file, in_order=True) or 0) > 0
    assert max(read, key=len) == [MIB * number for number in range(16)]
    read.clear()
    assert (read_speed(file) or 0) > 0
    assert sorted(place for places in read if len(places) == 2 for place in places) == [MIB * n for n in range(16)]


def test_a_file_that_is_too_small_or_missing_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(MIB))
    assert read_speed(tmp_path / "small") is None
    assert read_speed(tmp_path / "none") is None

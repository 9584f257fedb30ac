"""Archives of cached prefixes: intact and for this server, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.cache.archive import Archive, ArchivedRecord, ArchiveError, ArchiveSeal, TensorShape, write_archive
from ingot.errors import Cancelled

SECRET = b"a secret"
KEY = {"model": "abc", "tokenizer": "def"}
FIRST = ArchivedRecord(
    (1, 2, 3),
    0,
    True,
    ((0, 3, 1), None),
    ((), (True, False)),
    (TensorShape("F32", (1, 3)), TensorShape("U8", (2,))),
    salt="",
    parent=-1,
)
SECOND = ArchivedRecord((4, 5), 3, False, ((3, 5, 1), None), None, (TensorShape("BF16", (1, 2)),), salt="", parent=0)
DATA = [[b"a" * 12, b"bc"], [b"defg"]]


def opened(path: Path, key: dict[str, str] = KEY, secret: bytes = SECRET) -> Archive:
    return Archive.open(path, ArchiveSeal(key, secret), lambda: True)


def written(folder: Path, *pieces: ArchivedRecord, key: dict[str, str] = KEY, data: Any = None) -> Path:
    path = folder / "kept.safetensors"
    write_archive(
        path, ArchiveSeal(key, SECRET), zip(pieces or (FIRST, SECOND), data or DATA, strict=False), lambda: True
    )
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    held = opened(written(tmp_path))
    assert held.pieces == (FIRST, SECOND)
    assert list(held.data()) == DATA


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(written(tmp_path), framework="numpy") as held:
        assert sorted(held.keys()) == ["0.0", "0.1", "1.0"]
        assert held.get_tensor("0.1").tobytes() == b"bc"


def test_an_empty_archive_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    write_archive(path, ArchiveSeal(KEY, SECRET), (), lambda: True)
    assert opened(path).pieces == ()


def test_another_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="another model than this server's"):
        opened(written(tmp_path), {**KEY, "model": "xyz"})
    with pytest.raises(ArchiveError, match="another model and another tokenizer"):
        opened(written(tmp_path), {"model": "xyz", "tokenizer": "xyz"})


def test_a_key_that_the_file_lacks_is_another_one(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="another codec"):
        opened(written(tmp_path), {**KEY, "codec": "raw"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_no_byte_can_change_unnoticed(tmp_path: Path, place: float, change: int) -> None:
    path = written(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[int(place * len(raw))] ^= change
    path.write_bytes(raw)
    with pytest.raises(ArchiveError):
        opened(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.floats(0, 1, exclude_max=True))
def test_half_a_file_is_none(tmp_path: Path, length: float) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[: int(length * path.stat().st_size)])
    with pytest.raises(ArchiveError):
        opened(path)


def test_more_than_a_file_is_none_either(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArchiveError, match="checksum"):
        opened(path)


def test_some_other_safetensors_file_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(ArchiveError, match="not an archive of cached prefixes"):
        opened(path)


@pytest.mark.parametrize(
    "pieces",
    [
        (replace(FIRST, parent=0),),
        (replace(FIRST, parent=5),),
        (replace(FIRST, begin=2),),
        (FIRST, replace(SECOND, begin=4)),
        (FIRST, replace(SECOND, salt="other")),
        (FIRST, replace(SECOND, tokens=())),
        (FIRST, replace(SECOND, deltas=((3, 5, 2), None))),
        (FIRST, replace(SECOND, checkpoint=((), (True, True)))),
    ],
)
def test_pieces_that_do_not_fit_together_are_refused_though_the_checksum_is_right(
    tmp_path: Path, pieces: tuple[ArchivedRecord, ...]
) -> None:
    with pytest.raises(ArchiveError, match="does not fit the others"):
        opened(written(tmp_path, *pieces))


def test_a_file_of_another_servers_secret_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"another server's key.*--archive-key-file"):
        opened(written(tmp_path), secret=b"another secret")


def test_whoever_has_no_secret_cannot_make_a_file_though_its_checksum_is_right(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    place = header.index(b'"checksum": "') + len(b'"checksum": "')
    mac = header.index(b'"mac": "') + len(b'"mac": "')
    changed = data[:-1] + b"!"
    blank = header[:place] + b"0" * 64 + header[place + 64 : mac] + b"0" * 64 + header[mac + 64 :]
    checksum = blake2b(blank + changed, digest_size=32).hexdigest().encode()
    path.write_bytes(raw[:8] + header[:place] + checksum + header[place + 64 :] + changed)
    with pytest.raises(ArchiveError, match="another server's key"):
        opened(path)


def test_reading_stops_when_nobody_waits_any_more(tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        Archive.open(written(tmp_path), ArchiveSeal(KEY, SECRET), lambda: False)

"""Compiled kernels in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.kernels.gpu.cubins import CubinFolder, cubin_key


@pytest.fixture
def folder(tmp_path: Path) -> CubinFolder:
    return CubinFolder(tmp_path / "deep" / "kernels")


def test_what_was_written_is_read_again(folder: CubinFolder) -> None:
    folder.write("some", b"code")
    assert folder.read("some") == b"code"
    assert folder.read("other") is None


def test_the_folder_is_its_users_alone(folder: CubinFolder) -> None:
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    folder.folder.chmod(0o770)
    with pytest.raises(PermissionError, match="not this user's alone"):
        CubinFolder(folder.folder)


@pytest.mark.parametrize("damaged", [b"", b"code", b"\0" * 32, b"\0" * 32 + b"code"])
def test_a_damaged_file_is_none_and_is_written_anew(folder: CubinFolder, damaged: bytes) -> None:
    (folder.folder / "some.cubin").write_bytes(damaged)
    assert folder.read("some") is None
    folder.write("some", b"code")
    assert folder.read("some") == b"code"


def test_a_file_that_was_cut_anywhere_is_none(folder: CubinFolder) -> None:
    folder.write("some", b"some code")
    whole = (folder.folder / "some.cubin").read_bytes()
    for length in range(len(whole)):
        (folder.folder / "some.cubin").write_bytes(whole[:length])
        assert folder.read("some") is None


def test_what_fails_to_be_written_leaves_nothing(folder: CubinFolder) -> None:
    (folder.folder / "some.cubin").mkdir()
    with pytest.raises(OSError):
        folder.write("some", b"code")
    assert [file.name for file in folder.folder.iterdir()] == ["some.cubin"]


def test_beyond_its_bound_it_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    folder = CubinFolder(tmp_path / "kernels", most_bytes=2 * (32 + 4))
    for age, name in enumerate(("oldest", "middle", "newest")):
        folder.write(name, b"code")
        os.utime(folder.folder / f"{name}.cubin", (1000 + age, 1000 + age))
    assert folder.read("oldest") == b"code"
    folder.prune()
    assert {file.name for file in folder.folder.iterdir()} == {"oldest.cubin", "newest.cubin"}


@given(st.lists(st.text(alphabet="ab"), max_size=4), st.lists(st.text(alphabet="ab"), max_size=4))
def test_a_key_tells_everything_apart(some: list[str], others: list[str]) -> None:
    if some and others:
        assert (cubin_key(*some) == cubin_key(*others)) == (some == others)

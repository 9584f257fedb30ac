from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.keys import ArchiveKey
from ingot.errors import Unavailable


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "archive.key"
    first = ArchiveKey(path).secret()
    assert len(first) == 32 and ArchiveKey(path).secret() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [held.name for held in path.parent.iterdir()] == ["archive.key"]


def test_two_servers_have_two(tmp_path: Path) -> None:
    assert ArchiveKey(tmp_path / "a").secret() != ArchiveKey(tmp_path / "b").secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_can_read_is_not_relied_on(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "archive.key"
    ArchiveKey(path).secret()
    path.chmod(mode)
    with pytest.raises(Unavailable) as refused:
        ArchiveKey(path).secret()
    assert str(path) not in refused.value.message
    assert str(path) in caplog.text and "chmod 600" in caplog.text


@pytest.mark.parametrize("content", ["", "abc", "g" * 64, "0" * 65, "0" * 63])
def test_one_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "archive.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(Unavailable):
        ArchiveKey(path).secret()


def test_one_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable):
        ArchiveKey(tmp_path / "file" / "archive.key").secret()

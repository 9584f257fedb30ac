from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.cache.disk.store import DiskLimits
from ingot.cache.disk.survey import FolderSurvey, trim_folder
from ingot.cli.main import main
from tests.cache.disk.records import KEY, ME, bytes_in, opened, record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = opened(tmp_path)
    for number in range(4):
        store.write(*record([number] * 50))
    other = opened(tmp_path, model="another")
    other.write(*record([9] * 50, key=KEY | {"model": "another"}))
    store.close()  # which puts its index in order
    other.close()
    (tmp_path / "somebody's").write_bytes(b"x" * 1000)
    return tmp_path


def test_a_folder_is_listed_by_what_its_states_depend_on(folder: Path) -> None:
    found = FolderSurvey.of(folder)
    assert sorted((scope.about["model"], len(scope.files)) for scope in found.scopes) == [("abc", 4), ("another", 1)]
    assert found.nbytes == bytes_in(folder)


def test_a_damaged_record_is_named_and_left_where_it_is(folder: Path) -> None:
    assert list(FolderSurvey.of(folder).problems()) == []
    file = next(folder.glob("*/*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert list(FolderSurvey.of(folder).problems()) == [(file, "a tensor has another checksum")]
    assert file.exists()


def test_trimming_takes_the_least_used_of_all_models_and_no_other_file(folder: Path) -> None:
    store = opened(folder)
    kept = store.entries(ME)[0]
    store.touch([kept])
    store.settle()
    before = FolderSurvey.of(folder)
    assert 3 * kept.size <= trim_folder(folder, before.nbytes - 3 * kept.size) < 4 * kept.size
    assert kept.name in {file.name for file in folder.glob("*/*.safetensors")}
    trim_folder(folder, 0)
    assert list(folder.glob("*/*.safetensors")) == [] and (folder / "somebody's").exists()
    store.write(*record([5]))  # a server that uses it goes on
    assert [entry.end for entry in opened(folder, DiskLimits(1 << 26)).entries(ME)] == [1]


def test_the_command_lists_verifies_and_trims(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--cache-dir", str(folder)]
    assert main(["cache", "list", "--json", *here]) == 0
    assert len(json.loads(capsys.readouterr().out)["scopes"]) == 2
    assert main(["cache", "list", *here]) == 0
    shown = capsys.readouterr().out
    assert "the model another: 1 record, " in shown and "the model abc: 4 records, " in shown
    assert all(scope.scope not in shown for scope in FolderSurvey.of(folder).scopes)
    assert main(["cache", "verify", *here]) == 0
    assert "5 of 5 records intact" in capsys.readouterr().out
    file = next(folder.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["cache", "verify", "--json", *here]) == 1
    assert json.loads(capsys.readouterr().out)["damaged"][0]["file"] == str(file)
    assert main(["cache", "trim", "--to-gb", "0", *here]) == 0
    assert capsys.readouterr().out.startswith("freed")


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["trim", "--cache-dir", "."], ["list", "--cache-dir", "/nowhere/at/all"], ["verify", "--cach-dir", "."]],
)
def test_a_folder_that_is_not_named_or_not_there_is_said(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *arguments]) == 2
    assert capsys.readouterr().err

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.models.files.model_store import keep
from ingot.models.files.progress import silent
from tests.cli.conftest import Done
from tests.cli.scripted import INGOT, environment


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return tmp_path / ".cache/ingot/models"


def fill(target: Path) -> None:
    (target / "config.json").write_text("{}")


def kept(shelf: Path, folder: str, sha256: str = "0123456789abcdef") -> Path:
    origin = {"source": "gguf:tiny.gguf", "sha256": sha256}
    return keep(shelf / folder, origin, fill, silent)


def rm(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    return subprocess.run(
        [INGOT, "rm", *words], capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )


def answered(home: Path, answer: bytes, *words: str) -> int:
    """The exit code of the command that is asked on a terminal."""
    ours, theirs = pty.openpty()
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    try:
        os.write(ours, answer)
        ended = subprocess.run([INGOT, "rm", *words], stdin=theirs, capture_output=True, timeout=60, env=env)
    finally:
        os.close(ours)
        os.close(theirs)
    return ended.returncode


def test_a_model_is_removed_by_its_name_without_its_hash(tmp_path: Path, shelf: Path) -> None:
    gone, stays = kept(shelf, "Tiny-0123456789ab"), kept(shelf, "Other-0123456789ab")
    done = rm(tmp_path, "tiny", "--yes")
    assert (done.returncode, done.stdout) == (0, "removed Tiny-0123456789ab from the models folder\n")
    assert not gone.exists() and stays.exists()
    assert not [left for left in shelf.iterdir() if left.name.endswith(".part")]


def test_it_asks_first_and_takes_anything_but_yes_for_no(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    for answer in (b"\n", b"n\n", b"what\n"):
        assert answered(tmp_path, answer, "tiny") == 1
        assert folder.exists()
    assert answered(tmp_path, b"y\n", "tiny") == 0
    assert not folder.exists()


def test_without_a_terminal_it_removes_nothing_unless_told_to(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    done = rm(tmp_path, "tiny")
    assert done.returncode == 2 and "give --yes" in done.stderr
    assert folder.exists()


def test_what_ingot_did_not_put_there_is_refused(tmp_path: Path, shelf: Path) -> None:
    mine = shelf / "mine"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    for name in ("mine", str(mine), str(tmp_path / "own.gguf"), str(tmp_path)):
        done = rm(tmp_path, name, "--yes")
        assert done.returncode == 1 and "of your own" in done.stderr
    assert (mine / "config.json").exists() and (tmp_path / "own.gguf").exists()


def test_a_name_that_several_models_have_lists_them_and_removes_none(tmp_path: Path, shelf: Path) -> None:
    folders = [kept(shelf, "tiny-0123456789ab"), kept(shelf, "tiny-fedcba987654", "fedcba9876543210")]
    done = rm(tmp_path, "tiny", "--yes")
    assert done.returncode == 1
    assert all(folder.name in done.stderr and folder.exists() for folder in folders)
    assert rm(tmp_path, "tiny-fedcba987654", "--yes").returncode == 0
    assert folders[0].exists() and not folders[1].exists()


def test_a_beginning_of_a_name_is_not_enough_to_remove_it(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    done = rm(tmp_path, "ti", "--yes")
    assert done.returncode == 1 and "there is no model 'ti'" in done.stderr
    assert folder.exists()


def test_one_wrong_name_among_several_removes_none(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    assert rm(tmp_path, "tiny", "nothing", "--yes").returncode == 1
    assert folder.exists()


def test_a_packaged_model_that_is_not_here_is_said_to_be_so(tmp_path: Path) -> None:
    assert "has not been fetched" in rm(tmp_path, "smollm2-135m", "--yes").stderr


def test_a_model_of_the_hub_is_removed_from_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / "deadbeef"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "blobs" / "abc").write_bytes(bytes(12))
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / "abc")
    (repository / "refs" / "main").write_text("deadbeef")
    done = rm(tmp_path, "someone/tiny", "--yes")
    assert done.returncode == 0 and "from the hub's cache" in done.stdout
    assert not repository.exists()


def test_models_are_listed_without_the_hash_unless_two_have_the_same_name(
    shelf: Path, run_here: Callable[..., Done]
) -> None:
    kept(shelf, "one-0123456789ab")
    for folder, sha256 in (("two-0123456789ab", "0123456789abcdef"), ("two-fedcba987654", "fedcba9876543210")):
        kept(shelf, folder, sha256)
    told = json.loads(run_here("models", "--json").stdout)
    names = [model["name"] for model in told["models"] if model["kind"] == "local"]
    assert names == ["one", "two-0123456789ab", "two-fedcba987654"]

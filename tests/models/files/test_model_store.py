import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import ModelError
from ingot.models.files.model_store import inventory, is_kept, keep
from ingot.models.files.progress import silent

ORIGIN = {"source": "test:one", "sha256": "abc"}


def fill(target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "more").mkdir()
    (target / "more" / "weights").write_bytes(bytes(100))


def never(target: Path) -> None:
    raise AssertionError("built again")


def test_a_model_is_built_once(tmp_path: Path) -> None:
    folder = keep(tmp_path / "shelf" / "m", ORIGIN, fill, silent)
    assert (folder / "more" / "weights").read_bytes() == bytes(100)
    assert keep(folder, ORIGIN, never, silent) == folder
    assert [(kept.path, kept.source, kept.size) for kept in inventory(tmp_path / "shelf")] == [
        (folder, "test:one", 102)
    ]


def test_a_model_of_another_origin_is_replaced(tmp_path: Path) -> None:
    folder = keep(tmp_path / "m", ORIGIN, fill, silent)
    keep(folder, ORIGIN | {"sha256": "new"}, lambda target: (target / "only").touch(), silent)
    assert sorted(path.name for path in folder.iterdir()) == ["ingot.json", "only"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "manifest"])
def test_a_damaged_model_is_built_again(damage: str, tmp_path: Path) -> None:
    folder = keep(tmp_path / "m", ORIGIN, fill, silent)
    if damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "shorter":
        (folder / "more" / "weights").write_bytes(bytes(99))
    else:
        (folder / "ingot.json").write_text('{"origin": ')
    assert not is_kept(folder, ORIGIN)
    keep(folder, ORIGIN, fill, silent)
    assert is_kept(folder, ORIGIN)


@pytest.mark.parametrize(
    "content", ["[]", "7", '{"origin": 1, "files": 2}', '{"origin": {"source": "x"}, "files": [1]}', ""]
)
def test_a_manifest_that_makes_no_sense_counts_as_none(content: str, tmp_path: Path) -> None:
    folder = keep(tmp_path / "m", ORIGIN, fill, silent)
    (folder / "ingot.json").write_text(content)
    assert not is_kept(folder, ORIGIN)
    assert inventory(tmp_path) == []


def test_a_models_folder_that_cannot_be_made_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot prepare m in the models folder"):
        keep(tmp_path / "file" / "m", ORIGIN, fill, silent)


@pytest.mark.parametrize("error", [ModelError("no"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing_behind(error: BaseException, tmp_path: Path) -> None:
    def failing(target: Path) -> None:
        fill(target)
        (target.parent / "download").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)):
        keep(tmp_path / "m", ORIGIN, failing, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]
    assert inventory(tmp_path) == []


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    def failing(target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="cannot prepare m in the models folder: No space left on device"):
        keep(tmp_path / "m", ORIGIN, failing, silent)


def build_and_log(folder: Path, log: Path, barrier: "multiprocessing.synchronize.Barrier") -> None:
    def logged(target: Path) -> None:
        with log.open("a") as stream:
            stream.write("built\n")
        fill(target)

    barrier.wait(30)
    keep(folder, ORIGIN, logged, silent)


def test_processes_that_want_the_same_model_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, log = context.Barrier(3), tmp_path / "log"
    workers = [context.Process(target=build_and_log, args=(tmp_path / "m", log, barrier)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert log.read_text() == "built\n"
    assert is_kept(tmp_path / "m", ORIGIN)


KILLED = """
import sys
from pathlib import Path
from ingot.models.files.progress import silent
from ingot.models.files.model_store import keep

def forever(target):
    (target / "config.json").write_text("half")
    print("building", flush=True)
    sys.stdin.read()

keep(Path(sys.argv[1]), {"source": "test:one", "sha256": "abc"}, forever, silent)
"""


def test_what_a_killed_process_left_is_swept_and_built_anew(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "m")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"building\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list(tmp_path.glob(".m.*.part")) and not (tmp_path / "m").exists()
    keep(tmp_path / "m", ORIGIN, fill, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_whoever_waits_for_another_process_says_so(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "m")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        said: list[str] = []

        def let_it_finish(message: str, done: int | None = None, total: int | None = None) -> None:
            said.append(message)
            process.stdin.close()  # type: ignore[union-attr]

        keep(tmp_path / "m", ORIGIN, never, let_it_finish)
    assert said == ["waiting for another process that prepares m"]
    assert (tmp_path / "m" / "config.json").read_text() == "half"

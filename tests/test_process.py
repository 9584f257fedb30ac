"""What a process is asked of the system: memory that goes back to it, signals, and the forks that tests start."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.process import find_malloc_trim, is_signal_ignored, signals_not_ignored, trim_heap
from tests import conftest, processes

PIECE, PIECES = 64 << 10, 1024
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries give memory back by themselves")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@glibc
@pytest.mark.alone
def test_holes_between_what_is_kept_are_given_back() -> None:
    library, trim = ctypes.CDLL(None), find_malloc_trim()
    assert trim is not None
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[::2]:
        library.free(piece)
    holes = resident()
    trim()
    assert holes - resident() > PIECE * PIECES // 4
    for piece in pieces[1::2]:
        library.free(piece)


def test_a_heap_is_trimmed_again_and_again_until_the_server_stops() -> None:
    async def seen() -> int:
        times, enough = 0, asyncio.Event()
        loop = asyncio.get_running_loop()

        def trim() -> int:
            nonlocal times
            times += 1
            if times == 3:
                loop.call_soon_threadsafe(enough.set)
            return 1

        task = asyncio.create_task(trim_heap(trim, every_s=0.0))
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return times

    assert asyncio.run(seen()) >= 3


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture
def ignoring() -> Iterator[None]:
    """All of them are, for as long as the test takes."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_test_runs_with_signals_ignored() -> None:
    assert signals_not_ignored(*HANDLED) == HANDLED


@pytest.mark.usefixtures("ignoring")
def test_who_is_started_to_ignore_signals_heeds_none_of_them() -> None:
    assert signals_not_ignored(*HANDLED) == () and all(map(is_signal_ignored, HANDLED))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert signals_not_ignored(*HANDLED) == (signal.SIGTERM,)


@pytest.mark.usefixtures("ignoring")
@pytest.mark.parametrize("number", HANDLED)
def test_what_tests_start_does_not_ignore_what_they_were_started_to_ignore(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), {number.value}); print('alive')"]
    assert b"alive" in subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).stdout
    conftest.ignore_signals_alone()
    assert b"alive" not in subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).stdout
    signal.raise_signal(number)  # which the tests themselves still ignore


TOLD = """
import json, os, signal, sys, threading
print(json.dumps([sys.argv, sys.orig_argv, os.getcwd(), dict(os.environ), sys.stdin.read(), __name__]))
print(signal.getsignal(signal.SIGINT) == signal.default_int_handler, threading.active_count(), file=sys.stderr)
print(sorted(map(int, os.listdir("/proc/self/fd")))[:4] == [0, 1, 2, 3], file=sys.stderr)
sys.exit(3)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@linux
def test_a_fork_sees_what_a_process_would_see(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    env = {**os.environ, "LC_ALL": "C.UTF-8", "OF_NO": "other"}
    for command in (["-c", TOLD, "a b"], ["told.py", "ä"], ["-m", "told", ""]):
        full = [sys.executable, *command]
        asked: dict[str, Any] = {"input": "said", "capture_output": True, "text": True, "cwd": tmp_path, "env": env}
        assert processes.may_fork(full, env)
        forked, started = processes.run(full, **asked), subprocess.run(full, check=False, **asked)
        assert (forked.returncode, forked.stdout, forked.stderr) == (3, started.stdout, started.stderr)


@linux
def test_a_fork_is_waited_for_and_ended_like_a_process() -> None:
    with processes.start([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert isinstance(process, processes.Fork) and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
    assert process.poll() == process.returncode == -signal.SIGTERM


@linux
def test_a_fork_has_imported_nothing_that_reads_the_environment_of_the_hub() -> None:
    code = "import sys; print('ingot.engine.engine' in sys.modules, 'huggingface_hub' in sys.modules)"
    assert processes.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True False\n"


def test_what_imports_or_python_itself_must_see_is_not_forked() -> None:
    assert not processes.may_fork([sys.executable, "-X", "importtime", "-c", "pass"])
    assert not processes.may_fork([sys.executable, "-c", "pass"], {**os.environ, "INGOT_KERNELS": "blas"})
    assert not processes.may_fork([sys.executable, "-c", "pass"], preexec_fn=print)
    assert not processes.may_fork(["/bin/sh", "-c", "true"])

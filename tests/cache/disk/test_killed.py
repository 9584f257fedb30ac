"""Killed at any point, a folder holds what was written to the last bit, or nothing of it.

`make test` kills a process 20 times; INGOT_TEST_KILLS=500 pytest tests/cache/disk/test_killed.py does so 500 times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ingot.cache.disk.store import DiskLimits
from ingot.cache.disk.survey import FolderSurvey
from tests.cache.disk.records import ME, bytes_in, is_right, opened
from tests.processes import start

KILLS = int(os.environ.get("INGOT_TEST_KILLS", "20"))
CAP = 12_000_000
PATIENCE_S = 60
LONGEST_S = 0.25
"""From the first write to the kill."""


def begun(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cache.disk.hammer", str(folder), str(seed), str(CAP)]
    made = start(command, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(PATIENCE_S, made.kill)
    late.start()
    try:
        assert made.stdout is not None and made.stdout.readline() == "begun\n"
    finally:
        late.cancel()
    return made


def killed(processes: Sequence[subprocess.Popen[str]], after_s: float, folder: Path) -> None:
    """Meanwhile the cap is looked at again and again."""
    until = time.monotonic() + after_s
    try:
        while time.monotonic() < until:
            assert measured(processes, folder) <= CAP
            time.sleep(0.002)
    finally:
        for process in processes:
            process.kill()
    assert not any("WRONG" in process.communicate(timeout=PATIENCE_S)[0] for process in processes)


def measured(processes: Sequence[subprocess.Popen[str]], folder: Path) -> int:
    """At an instant, while they stand still: else a file may be counted that made room for the next."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
        await_stop(process.pid)
    try:
        return bytes_in(folder)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def await_stop(pid: int) -> None:
    if sys.platform != "linux":
        os.waitpid(pid, os.WUNTRACED)
        return
    tasks = Path(f"/proc/{pid}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] not in "TZ" for task in tasks.iterdir()):
        pass


def check(folder: Path) -> int:
    assert list(FolderSurvey.of(folder).problems()) == []
    store = opened(folder, DiskLimits(CAP, sync=False))
    entries = store.entries(ME)
    assert all(is_right(store.read(entry)) for entry in entries)
    assert bytes_in(folder) <= CAP and not list(folder.glob("*/.*"))
    assert not (folder / "damaged").exists()
    store.close()
    return len(entries)


def test_a_process_that_is_killed_at_any_point_leaves_whole_records(tmp_path: Path) -> None:
    rng = random.Random(0)
    found = []
    for kill in range(KILLS):
        killed([begun(tmp_path, kill)], rng.random() * LONGEST_S, tmp_path)
        found.append(check(tmp_path))
        if rng.random() < 0.2:
            (tmp_path / "index.sqlite").unlink()
    assert max(found) > 3


def test_two_processes_share_a_folder_and_keep_to_its_cap(tmp_path: Path) -> None:
    found = []
    for round_ in range(4):
        both = [begun(tmp_path, 100 + 2 * round_), begun(tmp_path, 101 + 2 * round_)]
        killed(both, 0.7, tmp_path)
        found.append(check(tmp_path))
    assert max(found) > 3  # not each: they also forget all that there is, now and then

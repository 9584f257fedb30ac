"""Workers: what they cannot do, who has the next one, and what becomes of those that die."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ingot.errors import BadMedia, Cancelled
from ingot.media import worker, worker_main
from ingot.media.worker import DecodedPart, DecodeJob, MediaClient, MediaWorker, WorkerPool, working_for
from tests.media.pdfs import pdf
from tests.media.pictures import file_of
from tests.waiting import WAIT_S

HEADER = DecodeJob("image header", "image", 64 << 20, 10.0)
MB = 1 << 20
ENDLESS = pdf((1000, 1000), drawn=b"0 0 1000 1000 re f " * 100_000)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="by means of Linux")


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool("media pixels", 2, 1, 256 * MB)
    yield made
    made.close()


def test_a_worker_starts_when_it_is_first_needed_and_is_used_again(pool: WorkerPool) -> None:
    assert pool.started == 0
    for _ in range(3):
        assert pool.run(HEADER, file_of(8, 9)).value[1:3] == [8, 9]
    assert pool.started == 1


def test_a_file_that_is_refused_costs_no_worker(pool: WorkerPool) -> None:
    for _ in range(2):
        with pytest.raises(BadMedia, match="not an image"):
            pool.run(HEADER, b"nothing")
    assert pool.started == 1


def test_a_worker_that_dies_is_the_end_of_its_request_alone(pool: WorkerPool) -> None:
    with pytest.raises(BadMedia, match="cannot be read"):
        pool.run(DecodeJob("a job that nobody knows", "file", MB, 1.0), b"")
    assert pool.run(HEADER, file_of(8, 9)).value[1:3] == [8, 9]
    assert pool.started == 2 and pool.booked == 0


def test_the_log_tells_how_a_worker_died_and_for_which_request(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    with working_for(MediaClient("ann", request="chatcmpl-1")), pytest.raises(BadMedia):
        pool.run(DecodeJob("a job that nobody knows", "file", MB, 1.0), b"")
    [record] = caplog.records
    assert record.getMessage() == (
        "a worker that read a file for chatcmpl-1 ended with 1: \"KeyError: 'a job that nobody knows'\""
    )
    assert record.facts["request_id"] == "chatcmpl-1"  # type: ignore[attr-defined]


def test_a_file_that_is_refused_and_one_whose_client_left_are_no_deaths(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadMedia):
        pool.run(HEADER, b"nothing")
    with working_for(MediaClient("ann", lambda: False)), pytest.raises(Cancelled):
        pool.run(DecodeJob("pdf page", "PDF", 256 * MB, 10.0, (0, (2000, 2000), (9, 9), 3)), ENDLESS)
    assert caplog.records == []


def test_a_worker_that_says_much_is_heard_to_its_last_line(pool: WorkerPool) -> None:
    process = MediaWorker()
    process._process.kill()
    process._stderr.close()
    reader, writer = os.pipe()
    process._stderr = os.fdopen(reader, "rb", 0)
    os.set_blocking(reader, False)
    for _ in range(5):
        os.write(writer, b"x" * 65_000 + b"\n")
        process._drain_stderr()
    os.write(writer, b"the last\n\n")
    assert process._end() == "SIGKILL: 'the last'"
    assert len(process._output) <= worker.STDERR_KEPT
    os.close(writer)


def test_a_worker_that_died_while_it_was_idle_is_nobodys_error(pool: WorkerPool) -> None:
    pool.run(HEADER, file_of(8, 9))
    pool._idle[0]._process.kill()
    pool._idle[0]._process.wait()
    assert pool.run(HEADER, file_of(8, 9)).value[1:3] == [8, 9]


@LINUX
def test_a_worker_knows_nothing_of_the_servers_environment_and_folder(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    pool.run(HEADER, file_of(8, 9))
    process = Path(f"/proc/{pool._idle[0].pid}")
    names = {each.partition(b"=")[0].decode() for each in (process / "environ").read_bytes().split(b"\0") if each}
    assert names == set(worker.ENVIRONMENT)
    assert (process / "cwd").readlink() == Path("/")
    assert len(list((process / "fd").iterdir())) <= 4


@LINUX
@pytest.mark.parametrize("call", ["__import__('socket').socket()", "__import__('os').execv('/bin/true', ['true'])"])
def test_a_worker_opens_no_socket_and_runs_no_program(call: str) -> None:
    program = f"from ingot.media import worker_main; worker_main.install_seccomp(); {call}"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "PermissionError" in made.stderr


KERNELS = {
    "x86_64": "socket 41, connect 42, bind 49, execve 59, kill 62, ptrace 101, tkill 200, process_vm_readv 310, "
    "process_vm_writev 311, execveat 322, pidfd_send_signal 424, io_uring_setup 425, pidfd_getfd 438",
    "aarch64": "ptrace 117, kill 129, tkill 130, socket 198, bind 200, connect 203, execve 221, process_vm_readv 270, "
    "process_vm_writev 271, execveat 281, pidfd_send_signal 424, io_uring_setup 425, pidfd_getfd 438",
}
"""From the kernel's own tables, `syscall_64.tbl` and `asm-generic/unistd.h`."""
NEEDED = {"x86_64": (0, 1, 3, 9, 12, 15, 45, 202, 231, 234), "aarch64": (63, 64, 57, 222, 214, 139, 207, 98, 94, 131)}
"""read, write, close, mmap, brk, rt_sigreturn, recvfrom, futex, exit_group and tgkill, which `abort` calls."""
HEADERS = [
    *Path("/usr/include").glob(f"{platform.machine()}-linux-gnu/asm/unistd_64.h"),
    *(Path("/usr/include").glob("asm-generic/unistd.h") if platform.machine() == "aarch64" else ()),
]


def judged(steps: list[tuple[int, int, int, int]], arch: int, call: int) -> int:
    """What the kernel would make of a call, by a filter's steps."""
    at, held, given = 0, 0, {0: call, 4: arch}
    while True:
        code, yes, no, number = steps[at]
        if code == 0x06:
            return number
        if code == 0x20:
            held, jump = given[number], 0
        else:
            jump = yes if (held == number if code == 0x15 else held >= number) else no
        at += 1 + jump


@pytest.mark.parametrize("machine", KERNELS)
def test_the_filter_refuses_what_the_kernels_table_calls_so_and_nothing_that_is_needed(machine: str) -> None:
    table = {name: int(number) for name, number in (each.split() for each in KERNELS[machine].split(", "))}
    assert set(table) == set(worker_main.DENIED_CALLS)
    steps, arch = worker_main.seccomp_filter(machine), worker_main.ARCHITECTURES[machine]
    other = next(each for each in worker_main.ARCHITECTURES.values() if each != arch)
    allowed, refused = 0x7FFF0000, 0x0005000D
    assert {name: judged(steps, arch, number) for name, number in table.items()} == dict.fromkeys(table, refused)
    assert {judged(steps, arch, number) for number in NEEDED[machine]} == {allowed}
    assert {number for number in range(1000) if judged(steps, arch, number) == refused} == set(table.values())
    assert judged(steps, other, NEEDED[machine][0]) == judged(steps, arch, 0x40000000) == refused
    assert worker_main.seccomp_filter("riscv64") == []


@pytest.mark.skipif(not HEADERS, reason="the kernel's headers are not here")
def test_the_numbers_of_calls_are_those_of_the_kernels_headers() -> None:
    found = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADERS[0].read_text()))
    place = list(worker_main.ARCHITECTURES).index(platform.machine())
    assert {name: str(numbers[place]) for name, numbers in worker_main.DENIED_CALLS.items()}.items() <= found.items()


SHUT_IN = """
import os, sys
from ingot.media import worker_main as w
w.load_decoders(); w.held_bytes()
print(w.install_landlock())
def tried(name, act):
    try: act(); print(name, "worked")
    except OSError as error: print(name, type(error).__name__)
tried("secret", lambda: open(sys.argv[1]).read())
tried("folder", lambda: os.listdir("/"))
tried("written", lambda: open(sys.argv[2], "w"))
tried("kill", lambda: os.kill(os.getppid(), 0))
tried("own", lambda: open(w.__file__).read())
tried("held", w.held_bytes)
import xml.dom.minidom, PIL.FliImagePlugin
"""


@LINUX
def test_a_worker_reads_and_writes_no_files_but_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the server")
    command = [sys.executable, "-c", SHUT_IN, str(secret), str(tmp_path / "new")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    supported, *told = made.stdout.splitlines()
    if supported == "False":
        pytest.skip("this kernel has no landlock")
    assert made.returncode == 0, made.stderr
    words = dict(line.split() for line in told)
    assert words == {
        **dict.fromkeys(("secret", "folder", "written"), "PermissionError"),
        **{"kill": words["kill"], "own": "worked", "held": "worked"},
    }


@LINUX
def test_memory_beyond_a_jobs_is_not_given() -> None:
    program = (
        "from ingot.media import worker_main as w; w.allow_memory(w.held_bytes() + (64 << 20)); bytearray(32 << 20); "
        "print('less'); bytearray(128 << 20)"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert made.stdout == "less\n" and "MemoryError" in made.stderr


class Told(MediaWorker):
    """Answers when the test says so, and writes down whom it began to work for."""

    def __init__(self, begun: list[str], go: threading.Event) -> None:
        self._begun, self._go = begun, go

    @property
    def alive(self) -> bool:
        return True

    def kill(self) -> None: ...

    def answer(self, job: DecodeJob, data: bytes, wanted: object) -> Iterator[DecodedPart]:
        self._begun.append(data.decode())
        assert self._go.wait(WAIT_S)
        yield DecodedPart(None, bytearray())


class Office:
    """A pool of such workers, and threads that ask it."""

    def __init__(self, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.asked = 0
        self.go, self.pause = threading.Event(), threading.Event()
        self.pool, self.threads = pool, ThreadPoolExecutor(16)
        monkeypatch.setattr(worker, "MediaWorker", lambda: Told(self.begun, self.go))

    def ask(self, name: str, memory: int = MB) -> None:
        """Returns when it waits, or works."""
        self.asked += 1
        self.threads.submit(self._run, name, memory)
        while not self._settled():
            self.pause.wait(0.001)

    def _settled(self) -> bool:
        with self.pool._changed:
            running = self.pool._running.total
            return len(self.pool._waiting) + running == self.asked and len(self.begun) == running

    def _run(self, name: str, memory: int) -> None:
        with working_for(MediaClient(name[0])):
            self.pool.run(DecodeJob("", "", memory, 1.0), name.encode())

    def end(self) -> list[str]:
        self.go.set()
        self.threads.shutdown(wait=True)
        return self.begun


def test_tenants_take_turns_and_none_has_all_workers(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(pool, monkeypatch)
    for name in ("a1", "a2", "a3", "b1"):
        office.ask(name)
    assert office.begun == ["a1", "b1"]
    office.ask("c1")
    begun = office.end()
    assert begun.index("c1") < begun.index("a3")


def test_a_job_waits_until_there_is_memory_for_it(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(pool, monkeypatch)
    office.ask("a1", 200 * MB)
    office.ask("b1", 100 * MB)
    assert office.begun == ["a1"] and 200 * MB <= pool.booked < 201 * MB
    assert office.end() == ["a1", "b1"] and pool.booked == 0


def test_who_leaves_while_it_waits_takes_no_turn(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(pool, monkeypatch)
    office.ask("a1")
    with working_for(MediaClient("a", lambda: False)), pytest.raises(Cancelled):
        pool.run(DecodeJob("", "", MB, 1.0), b"a2")
    assert office.end() == ["a1"] and not pool._waiting

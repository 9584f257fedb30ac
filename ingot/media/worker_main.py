"""The main program of a worker process: jobs of the server, one after another, until the server closes the socket.

Before it reads a byte, the process gives up what decoders do not need: on Linux new programs, sockets and other
processes (by seccomp), and all files but Python's, its own and fonts (by landlock, where the kernel has it); growing
files, and core dumps. For each job it limits its memory and processor time: by RLIMIT_CPU everywhere, and by RLIMIT_AS
on Linux. macOS does not enforce RLIMIT_AS, so there a thread watches the process's memory. Imports neither mlx nor the
rest of the server.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from ingot.errors import BadMedia
from ingot.media import audio, images, pdf, video
from ingot.media.worker import MESSAGE_HEAD

JobAnswer = Iterator[tuple[Any, Any]]
"""Values and raw bytes."""
DECODE_JOBS: Final[dict[str, Callable[..., JobAnswer]]] = {
    "image header": images.image_header_job,
    "image": images.image_job,
    "video header": video.video_header_job,
    "video keys": video.video_keyframes_job,
    "video frames": video.video_frames_job,
    "pdf sizes": pdf.pdf_sizes_job,
    "pdf page": pdf.pdf_page_job,
    "audio header": audio.audio_header_job,
    "audio samples": audio.audio_samples_job,
}
KEPT_BYTES: Final = 64 << 20
"""Bytes by which a worker may have grown and still be reused: stacks of threads stay."""
WATCH_S: Final = 0.02
NO_MEMORY: Final = "the file cannot be unpacked: it takes more memory than its size allows."


def main() -> None:
    load_decoders()
    set_process_limits()
    held_bytes()
    install_landlock()
    install_seccomp()
    if sys.platform != "linux":
        threading.Thread(target=watch_memory, daemon=True).start()
    server, idle = socket.socket(fileno=0), held_bytes()
    send_message(server, ("ready", "", True))
    while (question := receive_job(server)) is not None:
        answer_job(server, idle, *question)


def load_decoders() -> None:
    """Those that are installed; the server requests no others."""
    for name in ("av", "pypdfium2"):
        with suppress(ImportError):
            import_module(name)
    with suppress(ImportError):
        from PIL import Image

        Image.init()
        Image.MAX_IMAGE_PIXELS = None  # `check_image_size` does that, and memory is limited


def answer_job(
    server: socket.socket, idle: int, name: str, memory: int, cpu_s: float, arguments: list[Any], data: bytes
) -> None:
    """Run one job. `idle` is the memory of the process before its first."""
    before = held_bytes()
    allow_memory(before + memory)
    try:
        allow_cpu(cpu_s)
        for value, raw in DECODE_JOBS[name](data, *arguments):
            send_message(server, ("part", value, True), raw)
            allow_cpu(cpu_s)
        kind, message = "end", ""
    except BadMedia as refused:
        kind, message = "refused", refused.message
    except MemoryError:
        kind, message = "refused", NO_MEMORY
    lift_limits()
    send_message(server, (kind, message, held_bytes() <= idle + len(data) + KEPT_BYTES))


# Messages


def send_message(server: socket.socket, value: Any, raw: Any = b"") -> None:
    facts = msgspec.msgpack.encode(value)
    view = memoryview(raw).cast("B")
    server.sendall(MESSAGE_HEAD.pack(len(facts), len(view)) + facts)
    server.sendall(view)


def receive_job(server: socket.socket) -> tuple[str, int, float, list[Any], bytes] | None:
    """A job, or None where the server is gone."""
    head = _receive_bytes(server, MESSAGE_HEAD.size)
    if head is None:
        return None
    facts, length = MESSAGE_HEAD.unpack(head)
    job, data = _receive_bytes(server, facts), _receive_bytes(server, length)
    if job is None or data is None:
        return None
    name, memory, cpu_s, arguments = msgspec.msgpack.decode(job)
    return name, memory, cpu_s, arguments, data  # type: ignore[return-value]


def _receive_bytes(server: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        count = server.recv_into(left)
        if not count:
            return None
        left = left[count:]
    return data


# Limits

_ceiling = 0
"""Bytes that the process may use, where a thread watches that."""


def set_process_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def allow_memory(nbytes: int) -> None:
    """Limit the memory of the process from now on."""
    global _ceiling
    _ceiling = nbytes
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, hard))


def allow_cpu(seconds: float) -> None:
    """Limit the processor time from now on, after which the system ends the process."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, hard))


def lift_limits() -> None:
    """Until the next job: its file may be larger than the last job's memory."""
    global _ceiling
    _ceiling = 0
    for kind in (resource.RLIMIT_CPU, *([resource.RLIMIT_AS] if sys.platform == "linux" else [])):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


def held_bytes() -> int:
    """Bytes as the limit counts them: address space on Linux, elsewhere the peak memory."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(os.pread(_statm(), 99, 0).split()[0]) * resource.getpagesize()


@cache
def _statm() -> int:
    """Opened once, before landlock forbids it."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def watch_memory() -> None:
    while True:
        time.sleep(WATCH_S)
        if _ceiling and held_bytes() > _ceiling:
            os._exit(1)


# Restrictions

ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Their numbers in seccomp."""
DENIED_CALLS: Final = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),  # whose calls no filter sees
    "pidfd_getfd": (438, 438),
}
"""System calls that no decoder needs, by their numbers on each architecture."""
_ABOVE: Final = 0x40000000
"""Numbers from here on are calls of another ABI (x32)."""


def install_seccomp() -> None:
    """From now on, calls for sockets, programs and other processes fail, where the system has seccomp."""
    steps = seccomp_filter(platform.machine())
    if sys.platform != "linux" or struct.calcsize("P") != 8 or not steps:
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    if _forbid_new_privileges():
        ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def seccomp_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """A BPF program: (operation, steps to jump if true, if false, operand)."""
    if machine not in ARCHITECTURES:
        return []
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    allowed, refused = 0x7FFF0000, 0x00050000 | 13  # EACCES
    # In the filter's input, the call's number is at 0 and the architecture at 4.
    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, refused), (load, 0, 0, 0)]
    steps += [(above, 0, 1, _ABOVE), (give, 0, 0, refused)]
    for numbers in DENIED_CALLS.values():
        steps += [(equal, 0, 1, numbers[list(ARCHITECTURES).index(machine)]), (give, 0, 0, refused)]
    return [*steps, (give, 0, 0, allowed)]


def _forbid_new_privileges() -> bool:
    """Required before the process can restrict itself."""
    return bool(ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0)  # PR_SET_NO_NEW_PRIVS


_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""Landlock's calls, on both architectures."""
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 5: 16}
"""By version of landlock, how many file rights it has."""
FONTS: Final = ("/usr/share/fonts", "/usr/share/X11/fonts", "/usr/local/share/fonts")
"""Where pdfium looks for fonts that a PDF does not embed."""


def install_landlock() -> bool:
    """From now on, no file can be written, only Python's and the decoders' files and fonts can be read, no port can be
    opened, and no other process signalled. Returns False, and changes nothing, where the system has no landlock."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, 0, 1)  # LANDLOCK_CREATE_RULESET_VERSION
    if version < 1 or not _forbid_new_privileges():
        return False
    files = (1 << max(count for since, count in _RIGHTS.items() if since <= version)) - 1
    ports, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    rules = struct.pack("QQQ", files, ports, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return False
    for path in readable_paths():
        with suppress(OSError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
            libc.syscall(_ADD, ruleset, 1, struct.pack("=Qi", rights, opened), 0)  # LANDLOCK_RULE_PATH_BENEATH
            os.close(opened)
    restricted = libc.syscall(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)


def readable_paths() -> list[Path]:
    """The folders of imported packages, more of which may be imported later, and of fonts."""
    tops = {name.partition(".")[0] for name in sys.modules}
    found = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")} | set(map(Path, FONTS))
    for module in (sys.modules.get(top) for top in tops):
        found |= set(map(Path, getattr(module, "__path__", None) or filter(None, [getattr(module, "__file__", None)])))
    return sorted(path for path in found if path.exists())


if __name__ == "__main__":
    main()

"""Where the weights of experts lie in a model's files, and threads that read them.

In a safetensors file the weights of one expert are contiguous, whether the experts of a layer are one tensor or each
is a tensor of its own. Reader threads handle plain bytes only: MLX belongs to the engine thread. What was read is used
only if the file is still the one that was opened.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Final

from ingot.dataclass import dataclass
from ingot.errors import Unavailable
from ingot.models.checkpoint import checkpoint_files
from ingot.models.files.folder_checks import StoredTensor, read_safetensors_header

READERS: Final = 8
"""Threads: enough reads at once for the speed that SSDs have."""
LONGEST_WAIT_S: Final = 60.0
"""A read that takes longer has failed."""
ReadBytes = Callable[[int, memoryview, int], int]
"""From a file descriptor into memory, at an offset: how many bytes were read."""


class WeightsUnreadable(Unavailable):
    """Experts cannot be read from the model's files any more."""

    code = "weights_unreadable"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file, whose number is that in `ExpertFiles`."""

    file: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    size: int
    changed_ns: int


def read_bytes(descriptor: int, into: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [into], offset)


class ExpertFiles:
    """The safetensors files of a model, open for reading by any thread."""

    def __init__(self, folder: Path, read: ReadBytes = read_bytes) -> None:
        """Raises ModelError for files that are no safetensors files, or cut short."""
        self.read_bytes = read
        self.tensors: dict[str, tuple[int, StoredTensor]] = {}
        """By name, with the number of the file that has it."""
        self._files: list[_OpenFile] = []
        for path in checkpoint_files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            found = os.fstat(descriptor)
            number = len(self._files)
            self._files.append(_OpenFile(path, descriptor, found.st_size, found.st_mtime_ns))
            self.tensors |= {name: (number, one) for name, one in read_safetensors_header(path).items()}

    @property
    def largest(self) -> Path:
        return max(self._files, key=lambda file: file.size).path

    def read(self, place: FileRange, into: memoryview) -> None:
        """Raises WeightsUnreadable unless all of it was read, from a file that has not changed."""
        file, done = self._files[place.file], 0
        try:
            while done < place.size:
                count = self.read_bytes(file.descriptor, into[done : place.size], place.offset + done)
                if count <= 0:
                    raise WeightsUnreadable(f"{file.path.name} was cut short while its model was served; {_REMEDY}")
                done += count
            found = os.fstat(file.descriptor)
        except OSError as error:
            raise WeightsUnreadable(
                f"Experts cannot be read from {file.path.name}: {error.strerror or error}. Is the drive still there?",
                retry_after=5,
            ) from error
        if (found.st_size, found.st_mtime_ns) != (file.size, file.changed_ns):
            raise WeightsUnreadable(f"{file.path.name} was changed while its model was served; {_REMEDY}")

    def close(self) -> None:
        for file in self._files:
            os.close(file.descriptor)
        self._files = []


_REMEDY: Final = "load the model again."


@dataclass(eq=False)
class ExpertRead:
    """An expert that is read into memory, a range after another or several at once."""

    ranges: Sequence[FileRange]
    memory: Callable[[], Sequence[memoryview]]
    """Where to read it to, a range after another; called when a thread begins with it."""
    ahead: bool
    """Whether it was guessed that it will be needed."""
    convert: Callable[[Sequence[memoryview]], None] | None = None
    """Called once all of it was read."""
    into: Sequence[memoryview] = ()
    begun: set[int] = field(default_factory=set)
    """Ranges that a thread has begun with."""
    left: int = 0
    """Those that have not been read."""
    error: WeightsUnreadable | None = None
    done: threading.Event = field(default_factory=threading.Event)


class ExpertReaders:
    """Reads experts, those that are waited for first. `submit` and `hurry` are for the engine thread."""

    def __init__(self, files: ExpertFiles, threads: int = READERS) -> None:
        self._files = files
        self._tasks: queue.PriorityQueue[tuple[int, int, ExpertRead | None, int]] = queue.PriorityQueue()
        self._lock = threading.Lock()
        self._number = 0
        self._running, self._since = 0, 0.0
        self.bytes_read = 0
        self.reading_s = 0.0
        """Seconds in which anything was read."""
        self._threads = [
            threading.Thread(target=self._work, name=f"experts-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, reads: Iterable[ExpertRead]) -> None:
        for read in reads:
            read.left = len(read.ranges)
            for index in range(len(read.ranges)):
                self._put(1 if read.ahead else 0, read, index)

    def hurry(self, read: ExpertRead) -> None:
        """It is waited for now."""
        if read.ahead and not read.done.is_set():
            for index in range(len(read.ranges)):
                self._put(0, read, index)

    def close(self) -> None:
        for number, _ in enumerate(self._threads):
            self._tasks.put((2, number, None, 0))
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _put(self, urgency: int, read: ExpertRead, index: int) -> None:
        self._number += 1
        self._tasks.put((urgency, self._number, read, index))

    def _work(self) -> None:
        while True:
            _, _, read, index = self._tasks.get()
            if read is None:
                return
            with self._lock:
                if index in read.begun:  # it was hurried
                    continue
                if not read.begun:
                    read.into = read.memory()
                read.begun.add(index)
                self._running += 1
                if self._running == 1:
                    self._since = time.monotonic()
            self._finish(read, index, _guarded(partial(self._files.read, read.ranges[index], read.into[index])))

    def _finish(self, read: ExpertRead, index: int, error: WeightsUnreadable | None) -> None:
        with self._lock:
            read.left -= 1
            is_last = read.left == 0
            read.error = read.error or error
        if is_last and read.error is None and read.convert is not None:
            read.error = _guarded(partial(read.convert, read.into))
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self.reading_s += time.monotonic() - self._since
            self.bytes_read += read.ranges[index].size
        if is_last:
            read.done.set()


def _guarded(work: Callable[[], None]) -> WeightsUnreadable | None:
    """What went wrong: the thread goes on, and the requests end that wait for it."""
    try:
        work()
    except WeightsUnreadable as error:
        return error
    except Exception as error:
        return WeightsUnreadable(f"Experts cannot be read: {type(error).__name__}: {error}")
    return None

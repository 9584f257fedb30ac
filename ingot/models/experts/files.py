"""Where the weights of experts lie in a model's files, and threads that read them.

In a safetensors file the weights of one expert are contiguous, whether the experts of a layer are one tensor or each
is a tensor of its own; what lies side by side is read at once. Reader threads handle plain bytes only: MLX belongs to
the engine thread. What was read is used only if the file is still the one that was opened.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from errno import EFAULT, EINVAL
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import mlx.core as mx

from ingot.errors import ModelError, Unavailable
from ingot.models.checkpoint import checkpoint_files
from ingot.models.files.drive_speed import ALIGNED, open_past_cache
from ingot.models.files.folder_checks import (
    EXPERT_RECORDS,
    StoredTensor,
    read_record_layout,
    read_safetensors_header,
)

READERS: Final = 8
"""Threads: enough reads at once for the speed that SSDs have."""
MOST_GUESSES: Final = 2
"""Reads at once of what routers have guessed. Others queue where they can still be called off: what turns out to be
needed must not wait in the drive behind what does not."""
GUESS_BYTES: Final = 1 << 20
"""Of a guess, read before asking whether it was called off."""
LONGEST_WAIT_S: Final = 60.0
"""A read that takes longer has failed."""
ReadBytes = Callable[[int, Sequence[memoryview], int], int]
"""From a file descriptor into memory, one part after another, at an offset: how many bytes were read."""


class WeightsUnreadable(Unavailable):
    """Experts cannot be read from the model's files any more."""

    code = "weights_unreadable"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file, whose number is that in `ExpertFiles`."""

    file: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    size: int
    changed_ns: int


def read_bytes(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
    return os.preadv(descriptor, into, offset)


class ExpertFiles:
    """The safetensors files of a model, open for reading by any thread."""

    def __init__(self, folder: Path, read: ReadBytes = read_bytes) -> None:
        """Raises ModelError for files that are no safetensors files, or cut short."""
        self.folder, self.read_bytes = folder, read
        self.tensors: dict[str, tuple[int, StoredTensor]] = {}
        """By name, with the number of the file that has it."""
        self.records: dict[str, list[FileRange]] = {}
        """Of arrays that are parts of records, by the names that they have in the model: of each expert."""
        self._files: list[_OpenFile] = []
        self._past_cache: list[int] = []  # descriptors, or none
        for path in checkpoint_files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            found = os.fstat(descriptor)
            number = len(self._files)
            self._files.append(_OpenFile(path, descriptor, found.st_size, found.st_mtime_ns))
            tensors = read_safetensors_header(path)
            self.tensors |= {name: (number, one) for name, one in tensors.items()}
            for layer, parts in read_record_layout(path).items():
                self.records |= _parts_of_records(number, layer, tensors[f"{layer}.{EXPERT_RECORDS}"], parts)

    @property
    def largest(self) -> Path:
        return max(self._files, key=lambda file: file.size).path

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files)

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """What tells these files from others, and from what they may be written over with."""
        return tuple((str(file.path), file.size, file.changed_ns) for file in self._files)

    def pass_cache(self) -> bool:
        """Have spans read from the drive itself from now on, into memory that begins where a page does. Not every file
        system can do that: returns whether this one does."""
        opened: list[int] = []
        for file in self._files:
            descriptor = open_past_cache(file.path)
            if descriptor is None:
                for other in opened:
                    os.close(other)
                return False
            opened.append(descriptor)
        self._past_cache = opened
        return True

    @property
    def passes_cache(self) -> bool:
        return bool(self._past_cache)

    def span(self, place: FileRange) -> FileRange:
        """What has to be read for these bytes: whole pages, where reads pass the system's memory by."""
        if not self._past_cache:
            return place
        begin = place.offset // ALIGNED * ALIGNED
        return FileRange(place.file, begin, -(-place.end // ALIGNED) * ALIGNED - begin)

    def read(self, place: FileRange, into: Sequence[memoryview]) -> None:
        """Into parts that are as long together. Raises WeightsUnreadable unless all of it was read, from a file that
        has not changed."""
        self._read(self._files[place.file].descriptor, place, into)

    def read_span(self, span: FileRange, into: Sequence[memoryview]) -> None:
        """The same of what `span` gives. What is behind the file's end is not read."""
        if self._past_cache:
            try:
                self._read(self._past_cache[span.file], span, into)
                return
            except WeightsUnreadable as error:  # memory that the drive cannot write to by itself
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in (EINVAL, EFAULT):
                    raise
        self._read(self._files[span.file].descriptor, span, into)

    def _read(self, descriptor: int, place: FileRange, into: Sequence[memoryview]) -> None:
        file, done = self._files[place.file], 0
        least = min(place.size, file.size - place.offset) if self._past_cache else place.size
        try:
            while done < least:
                count = self.read_bytes(descriptor, _from(into, done), place.offset + done)
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
        for descriptor in (*self._past_cache, *(file.descriptor for file in self._files)):
            os.close(descriptor)
        self._files, self._past_cache = [], []


_REMEDY: Final = "unload and load the model, or restart the server."


def _parts_of_records(
    number: int, layer: str, records: StoredTensor, parts: Sequence[tuple[str, str, str, list[int]]]
) -> Iterator[tuple[str, list[FileRange]]]:
    experts, stride = records.shape
    begin = records.offset
    for projection, name, dtype, shape in parts:
        size = math.prod(shape) * getattr(mx, dtype).size
        yield (
            f"{layer}.{projection}.{name}",
            [FileRange(number, begin + expert * stride, size) for expert in range(experts)],
        )
        begin += size
    if begin > records.offset + stride:
        raise ModelError(f"{records.file.name}: the experts of {layer} are said to be longer than they are")


def _from(into: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """The parts without the first bytes."""
    if not done:
        return into
    left = []
    for part in into:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def padded(size: int) -> int:
    """In whole pages."""
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class SparePiece:
    memory: memoryview
    address: int


def page_memory(size: int) -> SparePiece:
    memory = mmap.mmap(-1, size)
    return SparePiece(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))


class SpareMemory:
    """Memory that begins where a page does, for experts that are not read into their slots themselves."""

    def __init__(self, allocate: Callable[[int], SparePiece] = page_memory) -> None:
        self._allocate = allocate
        self._free: dict[int, list[SparePiece]] = {}

    def reserve(self, count: int, size: int) -> None:
        """So many pieces, which are there from then on."""
        pieces = self._free.setdefault(padded(size), [])
        pieces += [self._allocate(padded(size)) for _ in range(count - len(pieces))]

    def take(self, size: int) -> SparePiece:
        """At least so many bytes. For any thread."""
        try:
            return self._free.setdefault(padded(size), []).pop()
        except IndexError:
            return self._allocate(padded(size))

    def give_back(self, piece: SparePiece) -> None:
        self._free.setdefault(len(piece.memory), []).append(piece)

    def clear(self) -> None:
        self._free.clear()


class ExpertRoom(Protocol):
    """Where an expert is read to. Reader threads call all of it."""

    @property
    def at_once(self) -> bool:
        """What is read goes into the slot itself."""

    def begin(self) -> Sequence[Sequence[memoryview]]:
        """Memory for each span, called when a thread begins with the first."""

    def deliver(self) -> bool:
        """All was read: take it to its slot, and return whether it is there, or else is for the engine thread."""

    def end(self) -> None:
        """The memory is not needed any more."""


@dataclass(eq=False)
class ExpertRead:
    """An expert that is read, a span of a file after another or several at once."""

    spans: Sequence[FileRange]
    room: ExpertRoom
    ahead: bool
    """Whether it was guessed that it will be needed."""
    into: Sequence[Sequence[memoryview]] = ()
    begun: set[int] = field(default_factory=set)
    """Spans that a thread has begun with."""
    left: int = 0
    """Those that have not been read."""
    running: int = 0
    """Those that threads are busy with."""
    writes: bool = False
    """What was in the slot is there no more."""
    delivered: bool = False
    cancelled: bool = False
    error: WeightsUnreadable | None = None
    done: threading.Event = field(default_factory=threading.Event)


class ExpertReaders:
    """Reads experts, those that are waited for first. `submit`, `hurry` and `cancel` are for the engine thread."""

    def __init__(self, files: ExpertFiles, threads: int = READERS) -> None:
        self._files = files
        self._needed: deque[tuple[ExpertRead, int]] = deque()
        self._guessed: deque[tuple[ExpertRead, int]] = deque()
        self._changed = threading.Condition()
        self._running, self._guessing, self._since = 0, 0, 0.0
        self._closed = False
        self.most = threads
        """Reads at once."""
        self.most_guesses = MOST_GUESSES
        """Of these, what was guessed."""
        self.bytes_read = 0
        self.reading_s = 0.0
        """Seconds in which anything was read."""
        self._threads = [
            threading.Thread(target=self._work, name=f"experts-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, reads: Iterable[ExpertRead]) -> None:
        with self._changed:
            for read in reads:
                read.left = len(read.spans)
                waiting = self._guessed if read.ahead else self._needed
                waiting.extend((read, index) for index in range(len(read.spans)))
                self._changed.notify(len(read.spans))

    def hurry(self, read: ExpertRead) -> None:
        """It is waited for now."""
        if not read.ahead or read.done.is_set():
            return
        with self._changed:
            read.ahead = False
            self._needed.extend((read, index) for index in range(len(read.spans)) if index not in read.begun)
            self._changed.notify(len(read.spans))

    def cancel(self, read: ExpertRead) -> bool:
        """Nobody needs it. Returns whether it leaves its slot as it was: else it goes on."""
        with self._changed:
            if read.writes or read.done.is_set():
                return False
            read.cancelled = True
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _next(self) -> tuple[ExpertRead, int, bool] | None:
        """A span to read, and whether it counts as a guess; None at the end."""
        with self._changed:
            while not self._closed:
                guess, may_guess = not self._needed, self._guessing < self.most_guesses
                if self._running < self.most and (self._needed or (self._guessed and may_guess)):
                    read, index = (self._guessed if guess else self._needed).popleft()
                    if read.cancelled or index in read.begun:  # it was hurried
                        continue
                    if not read.begun:
                        read.into = read.room.begin()
                    read.begun.add(index)
                    read.running += 1
                    read.writes = read.writes or read.room.at_once
                    self._running, self._guessing = self._running + 1, self._guessing + guess
                    if self._running == 1:
                        self._since = time.monotonic()
                    return read, index, guess
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            read, index, guess = taken
            self._finish(read, index, guess, _guarded(partial(self._read_span, read, index)))

    def _read_span(self, read: ExpertRead, index: int) -> None:
        span, done = read.spans[index], 0
        if len(read.into[index]) > 1:  # into the slot itself, which cannot be called off
            self._files.read_span(span, read.into[index])
            return
        [whole] = read.into[index]
        while done < span.size and not read.cancelled:
            size = min(GUESS_BYTES if read.ahead else span.size, span.size - done)
            self._files.read_span(FileRange(span.file, span.offset + done, size), [whole[done : done + size]])
            done += size

    def _finish(self, read: ExpertRead, index: int, guess: bool, error: WeightsUnreadable | None) -> None:
        with self._changed:
            read.left, read.running = read.left - 1, read.running - 1
            read.error = read.error or error
            is_last, is_useless = read.left == 0, read.cancelled or read.error is not None
            read.writes = read.writes or (is_last and not is_useless)
            is_unused = is_useless and read.running == 0 and (read.cancelled or is_last)
        if is_last and not is_useless:
            read.error = _guarded(partial(self._deliver, read))
            is_unused = read.delivered or read.error is not None
        if is_unused:
            read.room.end()
        with self._changed:
            self._running, self._guessing = self._running - 1, self._guessing - guess
            if self._running == 0:
                self.reading_s += time.monotonic() - self._since
            self.bytes_read += read.spans[index].size
            self._changed.notify()
        if is_last:
            read.done.set()

    @staticmethod
    def _deliver(read: ExpertRead) -> None:
        read.delivered = read.room.deliver()


def _guarded(work: Callable[[], None]) -> WeightsUnreadable | None:
    """What went wrong: the thread goes on, and the requests end that wait for it."""
    try:
        work()
    except WeightsUnreadable as error:
        return error
    except Exception as error:
        return WeightsUnreadable(f"Experts cannot be read: {type(error).__name__}: {error}")
    return None

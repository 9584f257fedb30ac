"""A process that writes, reads, touches and trims records as fast as it can, until it is killed.

python -m tests.cache.disk.hammer FOLDER SEED CAP
"""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.store import DiskLimits, RecordStore
from tests.cache.disk.records import KEY, ME, SECRET, is_right, record
from tests.waiting import WAIT_S


def hammer(folder: Path, seed: int, cap: int) -> None:
    sys.setswitchinterval(1e-4)  # else the writer, which gives way at each call to the system, hardly gets a turn
    disk = DiskBackend.of(RecordStore(folder, KEY, DiskLimits(cap, sync=False), SECRET))
    print("begun", flush=True)
    threading.Thread(target=read, args=(disk, seed), daemon=True).start()
    rng = random.Random(seed)
    while True:
        path = [rng.randrange(40)] * rng.randrange(1, 120)
        begin = rng.randrange(len(path))
        header, data = record(path, begin, checkpoint=rng.random() < 0.3)
        if disk.writer.offer(header, tuple(data)) is None:
            disk.writer.drain(0.01)
        if rng.random() < 0.01:
            disk.forget(ME.tenant)


def read(disk: DiskBackend, seed: int) -> None:
    rng = random.Random(-seed)
    while True:
        for entry in rng.sample(known := disk.store.entries(ME), min(5, len(known))):
            reading = disk.reader.ask(entry)
            reading.wait(WAIT_S)
            if reading.found is not None and not is_right(reading.found):
                print("WRONG", flush=True)
            disk.store.touch([entry])


if __name__ == "__main__":
    hammer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

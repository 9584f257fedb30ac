"""Thousands of damaged images, videos, audio files and PDFs sent to a server: what it answers, and whether it grows.

python -m bench.mutated_media                          10,000 files
python -m bench.mutated_media --files 500 --seed 7

The files are small valid ones of every supported kind, each changed at a few random positions: the same seed makes the
same files. The server has the foundry's vision model and a random speech-to-text model. Exit status 1: an answer of 500
or above, a broken connection, errors in the log, or memory that keeps growing.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from bench import servers
from bench.soak.acts import Answer, Fault, Person
from bench.soak.further_acts import transcription
from bench.soak.trend import trend
from bench.soak.watch import complaints

MODEL: Final = Path(__file__).parents[1] / "foundry" / "models" / "vision"
FLAGS: Final = ("--memory", "2GB", "--cache-memory", "4MB")
SHOWN: Final = 1000
"""Files after which figures are told."""
LOOKS: Final = 100
"""How often memory is read."""
GROWTH: Final = 0.05
"""The part by which memory may grow in the second half of 10,000 files. What is kept is bounded, but fills up until
about 13,000; of 25,000 files the second half took 0.4 % more."""
DEATH: Final = "a worker that read"
WRITTEN: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""What is written over numbers."""


class Original(NamedTuple):
    kind: str
    """Also what the address of its data says."""
    data: bytes


@cache
def originals() -> tuple[Original, ...]:
    from tests.hearing import tone, wav
    from tests.media import clips, pdfs, pictures
    from tests.media.test_audio import FORMS, encoded

    def picture(format: str, mode: str = "RGB", **options: Any) -> Original:
        return Original(f"image/{format}", pictures.saved(pictures.drawn(40, 30, mode), format, **options))

    def clip(format: str, codec: str = "mpeg4", **options: Any) -> Original:
        name = {"matroska": "x-matroska"}.get(format, format)
        return Original(f"video/{name}", clips.filmed(6, format=format, codec=codec, **options))

    made = [picture(format) for format in pictures.FORMATS]
    made += [picture("png", "RGBA"), picture("png", "P"), picture("png", "I;16"), picture("png", "1")]
    made += [picture("jpeg", "L"), picture("jpeg", "CMYK"), picture("jpeg", progressive=True)]
    made += [picture("webp", lossless=True), picture("gif", "L"), picture("bmp", "L")]
    made += [Original("image/jpeg", pictures.turned_file(40, 30, 6))]
    made += [clip("mp4"), clip("mov"), clip("matroska"), clip("mp4", between=2), clip("webm", "libvpx")]
    made += [clip("mp4", turn=90), clip("matroska", "mpeg2video")]
    made += [Original("audio/wav", wav(tone(0.05)))]
    made += [Original("audio/any", encoded(*form, tone(0.05))) for form in FORMS.values()]
    made += [Original("application/pdf", pdfs.pdf(*pages)) for pages in [((60, 60),), ((60, 60), (30, 90))]]
    made += [Original("application/pdf", pdfs.pdf((60, 60), rotate=90, drawn=b"BT /F1 9 Tf (text) Tj ET"))]
    return tuple(made)


def mutated(number: int, seed: int = 0) -> Original:
    """The file of this number."""
    random = Random(f"{seed}/{number}")
    kind, whole = random.choice(originals())
    data = bytearray(whole)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        random.choice(MUTATIONS)(data, random)
    return Original(kind, bytes(data))


def flip(data: bytearray, random: Random) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def overwrite(data: bytearray, random: Random) -> None:
    """A number, of whatever width and order, where the file may say a length or a count."""
    width, order = random.choice((1, 2, 4)), random.choice(("big", "little"))
    at = random.randrange(min(len(data), random.choice((64, 1024, len(data)))))
    data[at : at + width] = (random.choice(WRITTEN) & (1 << 8 * width) - 1).to_bytes(width, order)  # type: ignore[arg-type]


def noise(data: bytearray, random: Random) -> None:
    at, length = _stretch(data, random)
    data[at : at + length] = random.randbytes(length)


def cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(1, len(data) + 1) :]


def leave_out(data: bytearray, random: Random) -> None:
    at, length = _stretch(data, random)
    del data[at : min(at + length, len(data) - 1)]


def repeat(data: bytearray, random: Random) -> None:
    at, length = _stretch(data, random)
    data[at:at] = data[at : at + length] * random.choice((1, 1, 50))


def splice(data: bytearray, random: Random) -> None:
    """The end of another file."""
    other = random.choice(originals()).data
    data[random.randrange(1, len(data) + 1) :] = other[random.randrange(len(other)) :]


def _stretch(data: bytearray, random: Random) -> tuple[int, int]:
    return random.randrange(len(data)), random.choice((1, 4, 32, 256))


MUTATIONS: Final[tuple[Callable[[bytearray, Random], None], ...]] = (
    *(flip, flip, overwrite, overwrite, overwrite),
    *(noise, cut, leave_out, repeat, splice),
)


def shown(file: Original) -> dict[str, Any]:
    """A chat that holds it."""
    url = f"data:{file.kind};base64,{base64.b64encode(file.data).decode()}"
    match file.kind.partition("/")[0]:
        case "image":
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        case "video":
            part = {"type": "video_url", "video_url": {"url": url}, "max_frames": 4}
        case _:
            part = {"type": "file", "file": {"file_data": url}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "max_tokens": 1}


def sent(person: Person, file: Original) -> Answer:
    if file.kind.startswith("audio/"):
        raw, form = transcription("ears", file.data)
        return person.ask("/v1/audio/transcriptions", raw, form=form)
    return person.ask("/v1/chat/completions", shown(file))


class Sending:
    """Clients that send the files of the next numbers until there are no more."""

    def __init__(self, url: str, files: int, seed: int, clients: int) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self._numbers: Iterator[int] = iter(range(files))
        self._seed, self._lock = seed, threading.Lock()
        self._threads = [threading.Thread(target=self._send, args=(Person(url, "", at),)) for at in range(clients)]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> int:
        return self.statuses.total()

    @property
    def under_way(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _send(self, person: Person) -> None:
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            file = mutated(number, self._seed)
            try:
                answer = sent(person, file)
            except Fault as fault:
                answer = Answer(0, str(fault).encode())
            with self._lock:
                self.statuses[file.kind.partition("/")[0], answer.status] += 1
                if not answer.status or answer.status >= 500:
                    self.wrong.append(f"file {number}, {file.kind}: {answer.status} {answer.raw[:300]!r}")


def resident(pid: int) -> int:
    """Bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def attend(sending: Sending, pid: int, log: Path, files: int) -> list[tuple[int, int]]:
    """What the server's process held after how many files; tells it at each thousand."""
    seen, told = [(0, resident(pid))], 0
    print(f"at the start: {seen[0][1] / 1e6:.1f} MB", flush=True)
    while sending.under_way:
        time.sleep(0.05)
        done = sending.done
        if done - seen[-1][0] >= max(1, files // LOOKS):
            seen.append((done, resident(pid)))
        if done // SHOWN > told:
            told = done // SHOWN
            answers = ", ".join(f"{status}: {count}" for status, count in sorted(by_status(sending).items()))
            print(f"{done} files: {resident(pid) / 1e6:.1f} MB; {answers}; {deaths(log)} workers died", flush=True)
    return [*seen, (sending.done + 1, resident(pid))]


def by_status(sending: Sending) -> Counter[int]:
    found: Counter[int] = Counter()
    for (_, status), count in sending.statuses.copy().items():
        found[status] += count
    return found


def deaths(log: Path) -> int:
    return log.read_text(errors="replace").count(DEATH)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutated_media", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--log", type=Path, help="write the server's log here (default: nowhere)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ingot-mutated-") as folder:
        from tests.hearing import save_ears

        ears, log = save_ears(Path(folder) / "ears"), given.log or Path(folder) / "server.log"
        flags = [*FLAGS, "--audio-model", str(ears), "--responses-store", "off"]
        originals()  # made before threads ask for them
        with servers.ingot(MODEL, log, streams=given.clients, own_kernels=True, flags=flags) as server:
            sending = Sending(server.client.url, given.files, given.seed, given.clients)
            seen = attend(sending, server.pid, log, given.files)
        found = trend([float(done) for done, _ in seen], [float(held) for _, held in seen])
        wrong = [*sending.wrong, *complaints(log.read_text(errors="replace"))]
        died = deaths(log)
        if sending.done != given.files:
            wrong.append(f"{sending.done} of {given.files} files were sent")
    for (kind, status), count in sorted(sending.statuses.items()):
        print(f"{kind}: {count} answered {status}")
    grown = f"memory: {found.level / 1e6:.1f} MB, {found.growth / 1e6:+.2f} MB ({found.share:+.2%}) in the second half"
    print(f"{grown}; most {max(held for _, held in seen) / 1e6:.1f} MB; {died} workers died", flush=True)
    if found.share > GROWTH * 10_000 / given.files:
        wrong.append(grown)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""English text for training, taken from Debian packages whose licences allow it.

`python -m foundry.corpus` fetches the packages by name with apt-get, takes their text out and writes
foundry/build/corpus.txt.xz, and foundry/held_out.txt.xz, which ships: every fortieth document, never trained on.
Documents are separated by form feeds.
"""

from __future__ import annotations

import lzma
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

BUILD = Path(__file__).parent / "build"
CORPUS = BUILD / "corpus.txt.xz"
HELD_OUT = Path(__file__).parent / "held_out.txt.xz"
HELD_OUT_EVERY = 40
DOCUMENT_CHARACTERS = 6000

PACKAGES = {
    "r-cran-janeaustenr": "Jane Austen's six novels; the texts are in the public domain, the packaging is MIT",
    "bible-kjv-text": "the King James Bible; the text is in the public domain",
    "bible-kjv": "the program that unpacks that text; not part of the corpus",
    "wordnet-base": "WordNet 3.0's definitions and examples; the WordNet licence (permissive, BSD-like)",
}


def main() -> None:
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        roots = fetch(Path(folder))
        every = [*novels(roots), *scripture(roots), *definitions(roots)]
    for path, held_out in ((CORPUS, False), (HELD_OUT, True)):
        some = [text for number, text in enumerate(every) if (number % HELD_OUT_EVERY == 7) == held_out]
        path.write_bytes(lzma.compress("\f".join(some).encode(), preset=9))
        size = sum(map(len, some))
        print(f"{path.name}: {len(some)} documents, {size / 1e6:.1f} million characters")


def documents(*, held_out: bool) -> list[str]:
    """The documents to train on, or those that are never trained on."""
    return lzma.decompress((HELD_OUT if held_out else CORPUS).read_bytes()).decode().split("\f")


def fetch(folder: Path) -> dict[str, Path]:
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True, capture_output=True)
    roots = {}
    for package in PACKAGES:
        archive = next(folder.glob(f"{package}_*.deb"))
        roots[package] = folder / package
        subprocess.run(["dpkg-deb", "-x", archive, roots[package]], check=True)
    return roots


def novels(roots: dict[str, Path]) -> Iterator[str]:
    data = next(roots["r-cran-janeaustenr"].rglob("Rdata.rdb")).read_bytes()
    position = 0
    while position < len(data):
        unpacker = zlib.decompressobj()
        lines = _r_strings(unpacker.decompress(data[position + 4 :]))
        position = len(data) - len(unpacker.unused_data)
        yield from grouped(_paragraphs(lines))


def _r_strings(serialized: bytes) -> list[str]:
    """The strings of R's serialized character vector, in order."""
    found, position = [], serialized.index(b"\0\x04\0\x09")
    while serialized[position : position + 4] == b"\0\x04\0\x09":
        length = int.from_bytes(serialized[position + 4 : position + 8], "big")
        found.append(serialized[position + 8 : position + 8 + length].decode("utf-8", "replace"))
        position += 8 + length
    return found


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            held.append(line.strip())
        elif held:
            yield re.sub(r"\s+", " ", " ".join(held)).replace("_", "")
            held = []


def scripture(roots: dict[str, Path]) -> Iterator[str]:
    program = next(roots["bible-kjv"].rglob("bin/bible"))
    data = next(roots["bible-kjv-text"].rglob("bible.data")).parent
    made = subprocess.run(
        [program, "-f", "-p", data, "gen1:1-rev22:21"], input="", check=True, capture_output=True, text=True
    )
    verses = [re.sub(r"^\S+:\d+\s+", "", line).strip() for line in made.stdout.splitlines()]
    yield from grouped(verse for verse in verses if verse)


def definitions(roots: dict[str, Path]) -> Iterator[str]:
    for kind in ("noun", "verb", "adj", "adv"):
        path = next(roots["wordnet-base"].rglob(f"data.{kind}"))
        yield from grouped(_glosses(path.read_text(encoding="latin-1").splitlines()))


def _glosses(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("  ") or "|" not in line:
            continue
        word = line.split()[4].split("(")[0]
        if word.islower() and word.isalpha():
            yield f"{word}: {line.split('|', 1)[1].strip()}"


def grouped(paragraphs: Iterable[str]) -> Iterator[str]:
    """Documents of about DOCUMENT_CHARACTERS, cut between paragraphs."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) > DOCUMENT_CHARACTERS:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


if __name__ == "__main__":
    main()

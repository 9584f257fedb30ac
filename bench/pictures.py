"""Streams alongside a request with many images: the time between their tokens while the vision tower runs.

python -m bench.pictures                             the foundry's model
python -m bench.pictures --tower siglip --depth 6    a tower of SigLIP's size, six of its layers, with random weights
python -m bench.pictures --tower qwen --side 448 --pictures 4 --streams 8
python -m bench.pictures --video 20                  instead: a clip of so many seconds, which a server is asked about

Times are milliseconds between two tokens of a stream, for all streams together: alone, then alongside the request until
it has its first token. The target is that of --target-itl-ms. Of a clip, the time to the first token of a question
about it, decoding included, and of another question about the same clip, whose frames are not computed again.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import servers
from bench.seeing_models import TOWERS, write
from ingot.cli.peers.session import Heard, listen
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended, Failed, Request, Sampling, Stop
from ingot.engine.streams import BlockingStream
from ingot.media.image_processors import read_processor
from ingot.media.images import BICUBIC, DecodingMemory, Pixels, View, frames_of_parts, render_views
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, MediaProcessor, Size
from ingot.media.worker import DecodedPart

FOUNDRY = Path(__file__).parents[1] / "foundry" / "models" / "vision"
ENDLESS = 4096
"""Tokens of a stream, which is cancelled when nothing is left to measure."""


@dataclass(frozen=True)
class Noise:
    """A picture of random colours."""

    seed: int
    side: int

    @property
    def size(self) -> Size:
        return Size(self.side, self.side)

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return DecodingMemory(0, 0, self.size)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        drawn = np.random.default_rng(self.seed).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
        made = render_views(Image.fromarray(drawn), views, resample)
        return frames_of_parts((DecodedPart(None, bytearray(data)) for _, data in made), self.size, views)


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between tokens."""

    found: Sequence[float]

    def __str__(self) -> str:
        p50, p95, most = np.percentile(self.found, [50, 95, 100])
        return f"p50 {p50:6.1f}  p95 {p95:6.1f}  most {most:6.1f} ms  ({len(self.found)} tokens)"


class Reader:
    """A stream, read by a thread of its own, which notes when each token came."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request, self.times = request, list[float]()
        self._begun = threading.Event()
        self._stream = engine.generate(request)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for batch in self._stream:
            if not isinstance(batch[-1], Failed):
                self.times.append(time.monotonic())
            self._begun.set()

    def wait(self) -> None:
        """Until it has its first token."""
        self._begun.wait()

    def close(self, engine: Engine) -> None:
        engine.cancel(self.request.id)
        self._thread.join()


def gaps(readers: Sequence[Reader], since: float, until: float) -> Gaps:
    """Between tokens of which the second came within that time."""
    return Gaps(
        [
            1000 * (later - earlier)
            for reader in readers
            for earlier, later in pairwise(list(reader.times))
            if since < later <= until
        ]
    )


def asked(name: str, tokens: Sequence[int], items: Sequence[MediaItem] = (), count: int = ENDLESS) -> Request:
    return Request(
        name,
        (tuple(tokens),),
        max_tokens=count,
        sampling=Sampling(temperature=0.0),
        stop=Stop(ignore_eos=True),
        media=(tuple(items),) if items else (),
    )


def showing(name: str, processor: MediaProcessor, pictures: int, side: int, seed: int = 0) -> Request:
    """A request of so many pictures, no two alike."""
    tokens: list[int] = [1, 2, 3]
    items = []
    layout = processor.image_layout(Size(side, side), ImageLayoutOptions())
    for number in range(pictures):
        begin = len(tokens)
        tokens += [3] * layout.features + [4]
        digest = f"{name} {seed} {number}".encode().ljust(32)
        runs = ((begin, begin + layout.features),)
        items.append(MediaItem("image", digest, runs, layout, Noise(seed * 1000 + number, side)))
    return asked(name, tokens, items, count=1)


def ended(stream: BlockingStream) -> Ended:
    *_, batch = stream
    last = batch[-1]
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Ended)
    return last


@dataclass(frozen=True)
class Found:
    alone: Gaps
    beside: Gaps
    seconds: float  # until the request of pictures had its token


def measure(
    engine: Engine, processor: MediaProcessor, *, streams: int, pictures: int, side: int, alone_s: float
) -> Found:
    ended(engine.generate(showing("warm-up", processor, 1, side)))
    readers = [Reader(engine, asked(f"stream {number}", [5 + number, 6, 7])) for number in range(streams)]
    for reader in readers:
        reader.wait()
    began = time.monotonic()
    time.sleep(alone_s)
    sent = time.monotonic()
    ended(engine.generate(showing("shown", processor, pictures, side, seed=1)))
    until = time.monotonic()
    for reader in readers:
        reader.close(engine)
    engine.check()
    return Found(gaps(readers, began, sent), gaps(readers, sent, until), until - sent)


RATE = 10
"""Frames of a clip's second."""


def clip(seconds: int, side: int, seed: int) -> str:
    """The data URL of an MP4 file of random colours, which change with every second."""
    import av

    file, dice = io.BytesIO(), np.random.default_rng(seed)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for _ in range(seconds):
            drawn = np.full((side, side, 3), dice.integers(0, 256, 3), np.uint8)
            for _ in range(RATE):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(drawn, format="rgb24")))
        container.mux(stream.encode(None))
    return f"data:video/mp4;base64,{base64.b64encode(file.getvalue()).decode()}"


def watch(folder: Path, seconds: int, side: int) -> str:
    """What a server takes for a clip, and for another question about it."""

    def ask(shown: str, question: str) -> Heard:
        content = [{"type": "video_url", "video_url": {"url": shown}}, {"type": "text", "text": question}]
        body = {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        return listen(server.client, {**body, "temperature": 0, "ignore_eos": True})

    with (
        tempfile.TemporaryDirectory() as logs,
        servers.ingot(folder, Path(logs) / "log", 1, own_kernels=True) as server,
    ):
        ask(clip(1, side, 0), "What is this?")
        shown = clip(seconds, side, 1)
        first, again = ask(shown, "What is the first colour?"), ask(shown, "What comes last?")
    return (
        f"{seconds} s of video, {first.prompt_tokens} tokens: first token after {first.ttft:.2f} s, "
        f"of another question after {again.ttft:.2f} s, with {again.cached_tokens} tokens cached"
    )


@contextmanager
def folder_of(tower: str | None, depth: int | None, model: Path) -> Iterator[Path]:
    if tower is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        write(Path(made), tower, depth)
        yield Path(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOUNDRY, help="a folder with a vision model")
    parser.add_argument("--tower", choices=TOWERS, help="instead: a model with random weights and such a tower")
    parser.add_argument("--depth", type=int, help="this many of its layers")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--video", type=int, help="seconds of a clip to be asked about, instead of images")
    parser.add_argument("--side", type=int, default=192, help="width and height of an image in pixels")
    parser.add_argument("--alone-s", type=float, default=0.5)
    parser.add_argument("--target-itl-ms", type=float, default=Settings().target_itl_ms)
    chosen = parser.parse_args()
    settings = Settings(target_itl_ms=chosen.target_itl_ms, speculate="off")
    with folder_of(chosen.tower, chosen.depth, chosen.model) as folder:
        if chosen.video:
            print(watch(folder, chosen.video, chosen.side))
            return 0
        engine = start_engine(settings, folder, name="bench", source="benchmark")
        try:
            found = measure(
                engine,
                read_processor(folder),
                streams=chosen.streams,
                pictures=chosen.pictures,
                side=chosen.side,
                alone_s=chosen.alone_s,
            )
        finally:
            engine.close()
    print(f"{chosen.streams} streams, target {chosen.target_itl_ms:g} ms")
    print(f"alone                        {found.alone}")
    print(f"alongside {chosen.pictures} images, {found.seconds:5.1f} s  {found.beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

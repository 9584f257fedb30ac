"""The vision encoder at work between steps: pixels in threads, the encoder in slices, features cached by content.

A sequence that needs features waits without holding up others, and reserves the memory for all of them at once, so
that nobody waits for memory that only waiting ones hold. Features that nobody needs any more stay until room is
needed. `visual_inputs` are the features that a forward pass is given. For the engine thread alone, but that pixels
are made in others.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import mlx.core as mx

from ingot.engine.sequence import TokenSequence
from ingot.errors import IngotError, RequestTooLarge
from ingot.kernels.device import is_device_lost
from ingot.media import bounds, worker
from ingot.media.images import DecodingMemory
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, MediaProcessor, Size
from ingot.models.vision.tower import (
    EncodingBytes,
    EncodingSlices,
    PixelArray,
    VisionFeatures,
    VisionTower,
    VisualInputs,
)

log = logging.getLogger("ingot.engine")

PIXEL_THREADS, PIXEL_THREADS_EACH = 8, 6
"""Threads that wait for workers to decode images and video, in all and for one tenant."""
SLICE_TIME_DECAY = 0.9
"""What is left, slice by slice, of the longest slice's time in what is expected of the next."""
PIXEL_PAUSE_S = 0.005
MORE_MEMORY = "serve the model with more --memory"
VISION_FAILED = "The image or video could not be encoded; the server's log says why"


@dataclass(frozen=True, slots=True)
class VisionMemory:
    """Bytes that are set aside for vision: for pixels and what the tower holds while it runs, for features, and for
    the processes that unpack files."""

    work: int
    features: int
    unpacking: int = 0

    @property
    def total(self) -> int:
        return self.work + self.features + self.unpacking + (worker.header_pool.memory if self.unpacking else 0)

    def refuse(self, items: Iterable[MediaItem], tower: VisionTower, processor: MediaProcessor | None = None) -> None:
        """Raises RequestTooLarge for what cannot be encoded within them."""
        features = 0
        for item in {item.digest: item for item in items}.values():
            needs = tower.needs(item.layout)
            features += needs.features
            _refuse_decoding(item.source.unpacking(tower.views(item.source.size, item.layout)))
            if needs.pixels + needs.work > self.work:
                raise RequestTooLarge(
                    f"Encoding one of the images or videos takes {_mb(needs.pixels + needs.work)}, of "
                    f"{_mb(self.work)} that are set aside for it. {self._advice(item, tower, processor)}",
                    param="messages",
                )
        if features > self.features:
            raise RequestTooLarge(
                f"The features of the request's images and videos take {_mb(features)}, of {_mb(self.features)} that "
                f"are set aside for it. Send fewer or smaller ones, or {MORE_MEMORY}.",
                param="messages",
            )

    def _advice(self, item: MediaItem, tower: VisionTower, processor: MediaProcessor | None) -> str:
        size = None
        if item.kind == "image" and processor is not None:
            size = self._largest(item.source.size, tower, processor)
        if size is None:
            return f"Send a smaller one, or {MORE_MEMORY}."
        return f"Send it as at most {size.width} by {size.height}, or {MORE_MEMORY}."

    def _largest(self, shape: Size, tower: VisionTower, processor: MediaProcessor) -> Size | None:
        """The largest size of this shape that can be encoded."""

        def fits(side: int) -> Size | None:
            scale = side / max(shape)
            size = Size(*(max(1, int(each * scale)) for each in shape))
            try:
                needs = tower.needs(processor.image_layout(size, ImageLayoutOptions()))
            except IngotError:  # too flat for this model
                return None
            return size if needs.pixels + needs.work <= self.work else None

        side = bisect_left(range(1, max(shape)), True, key=lambda side: fits(side) is None)
        return fits(side) if side else None


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """A vision tower, and the memory that it may take. `processor` is asked what would fit."""

    tower: VisionTower
    memory: VisionMemory
    processor: MediaProcessor | None = None

    def refuse(self, media: Iterable[Iterable[MediaItem]]) -> None:
        """Raises RequestTooLarge for prompts with more than can be encoded, before anything is decoded."""
        for items in media:
            self.memory.refuse(items, self.tower, self.processor)


@dataclass(eq=False, slots=True)
class _EncodedItem:
    """An item that somebody waits for or holds features of. Its bytes are reserved."""

    item: MediaItem
    nbytes: int
    tenant: str  # who sent it first
    request: str
    holders: set[TokenSequence] = field(default_factory=set)
    left: threading.Event = field(default_factory=threading.Event)  # nobody waits for it any more
    pixels: Future[PixelArray] | None = None
    slices: EncodingSlices | None = None
    features: VisionFeatures | None = None


class VisionEncoderRunner:
    """For the engine's thread alone, but that pixels are made in others."""

    def __init__(self, vision_encoder: VisionEncoder) -> None:
        self._tower, self._memory = vision_encoder.tower, vision_encoder.memory
        self._encodings: OrderedDict[bytes, _EncodedItem] = OrderedDict()  # that somebody holds, in order of arrival
        self._cached: OrderedDict[bytes, VisionFeatures] = OrderedDict()  # the others, the longest unused first
        self._threads = ThreadPoolExecutor(PIXEL_THREADS, thread_name_prefix="ingot-pixels")
        worker.pixel_pool.lend(vision_encoder.memory.unpacking)
        self._expected_s = 0.0  # of the next slice
        self.runs = 0
        """How often the tower was run."""
        self.asked = self.found = 0
        """Images and videos that a prompt first came with, and those whose features were there or on their way."""

    def ready(self, sequence: TokenSequence, known: int) -> bool:
        """Whether a sequence of which `known` tokens will be reused has the features of all the others. If not, it
        will, once there is memory for them."""
        media = sequence.prompt_media
        if media is None:
            return True
        wanted = media.ahead(known)
        if all(item.digest in media.features for item in wanted):
            return True
        self._release_unused()
        if not all(sequence in self._holders(item) for item in wanted) and not self._reserve(sequence, wanted):
            return False
        encodings = [self._encodings[item.digest] for item in wanted]
        found = {encoding.item.digest: encoding.features for encoding in encodings if encoding.features is not None}
        if len(found) < len(encodings):
            return False
        media.features.update(found)
        return True

    def advance(self, seconds: float) -> bool:
        """Run the tower for no longer than that, as slices before it let expect, but for a slice at least. Whether
        there was something to do.

        Raises VisionEncodingFailed with the requests whose item cannot be encoded.
        """
        now = time.monotonic()
        end = now + seconds
        worked = False
        for encoding in self._pending():
            while encoding.features is None:
                self._run_slice(encoding)
                began, now = now, time.monotonic()
                self._expected_s = max(now - began, SLICE_TIME_DECAY * self._expected_s)
                worked = True
                if now + self._expected_s > end:
                    return worked
        return worked

    def pause(self) -> None:
        """Nothing can be computed: wait a little for pixels."""
        waited = [encoding.pixels for encoding in self._encodings.values() if encoding.pixels is not None]
        if waited:
            wait(waited, PIXEL_PAUSE_S)

    def check(self) -> None:
        self._release_unused()
        assert self._reserved + self._cached_bytes <= self._memory.features, "features take too much memory"
        assert all(encoding.holders for encoding in self._encodings.values()), "an item is encoded for nobody"

    def close(self) -> None:
        for encoding in self._encodings.values():
            encoding.left.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        worker.pixel_pool.lend(-self._memory.unpacking)

    def _holders(self, item: MediaItem) -> set[TokenSequence]:
        encoding = self._encodings.get(item.digest)
        return set() if encoding is None else encoding.holders

    @property
    def _reserved(self) -> int:
        return sum(encoding.nbytes for encoding in self._encodings.values())

    @property
    def _cached_bytes(self) -> int:
        return sum(features.nbytes for features in self._cached.values())

    def _reserve(self, sequence: TokenSequence, wanted: list[MediaItem]) -> bool:
        """Have all items of a sequence encoded, if memory holds their features alongside those of others."""
        fresh = [item for item in wanted if item.digest not in self._encodings]
        needed = {item.digest: self._tower.needs(item.layout).features for item in fresh}
        if self._reserved + sum(needed.values()) > self._memory.features:
            return False
        if sequence.preemptions == 0 and sequence.index % sequence.request.n == 0:
            self.asked += len(wanted)
            self.found += sum(item.digest in self._encodings or item.digest in self._cached for item in wanted)
        for item in fresh:
            features = self._cached.pop(item.digest, None)
            request = sequence.request
            self._encodings[item.digest] = _EncodedItem(
                item, needed[item.digest], request.tenant, request.id, features=features
            )
        for item in wanted:
            self._encodings[item.digest].holders.add(sequence)
        while self._cached and self._reserved + self._cached_bytes > self._memory.features:
            self._cached.popitem(last=False)
        return True

    def _pending(self) -> list[_EncodedItem]:
        """Those whose work is under way, then those whose pixels are there."""
        self._release_unused()
        encodings = [encoding for encoding in self._encodings.values() if encoding.features is None]
        self._start_decoding(encodings)
        started = [encoding for encoding in encodings if encoding.slices is not None]
        return started + [encoding for encoding in encodings if encoding.pixels is not None and encoding.pixels.done()]

    def _start_decoding(self, encodings: list[_EncodedItem]) -> None:
        """Have the next ones decoded, as far as there is memory for their pixels alongside the tower's work. Tenants
        take turns, and none has all threads."""
        needs = {encoding: self._tower.needs(encoding.item.layout) for encoding in encodings}
        held_bytes = sum(
            needs[encoding].pixels
            for encoding in encodings
            if encoding.pixels is not None or encoding.slices is not None
        )
        work = max((each.work for each in needs.values()), default=0)
        running = Counter(
            encoding.tenant for encoding in encodings if encoding.pixels is not None and not encoding.pixels.done()
        )
        waiting = [encoding for encoding in encodings if encoding.pixels is None and encoding.slices is None]
        while waiting and running.total() < PIXEL_THREADS:
            encoding = min(waiting, key=lambda each: running[each.tenant])
            if running[encoding.tenant] >= PIXEL_THREADS_EACH:
                return
            if held_bytes and held_bytes + needs[encoding].pixels + work > self._memory.work:
                return
            encoding.pixels = self._threads.submit(self._decode_pixels, encoding)
            waiting.remove(encoding)
            running[encoding.tenant] += 1
            held_bytes += needs[encoding].pixels

    def _decode_pixels(self, encoding: _EncodedItem) -> PixelArray:
        """Its pixels, in a thread that waits for a worker; that is killed where nobody waits for them any more."""
        with worker.working_for(
            worker.MediaClient(encoding.tenant, lambda: not encoding.left.is_set(), encoding.request)
        ):
            return self._tower.pixels(encoding.item)

    def _run_slice(self, encoding: _EncodedItem) -> None:
        try:
            if encoding.slices is None:
                assert encoding.pixels is not None
                encoding.slices = self._tower.encode(encoding.pixels.result(), encoding.item.layout)
                encoding.pixels = None
                self.runs += 1
            mx.eval(*next(encoding.slices))
        except StopIteration as done:
            features: VisionFeatures = done.value
            mx.eval(*features.arrays)
            encoding.features, encoding.slices = features, None
        except IngotError as error:
            raise self._failed(encoding, error) from error
        except Exception as error:  # of a tower or a decoder, in whatever way
            if is_device_lost(error):
                raise
            log.exception("an image or video could not be encoded")
            raise self._failed(encoding, IngotError(VISION_FAILED)) from error

    def _failed(self, encoding: _EncodedItem, error: IngotError) -> VisionEncodingFailed:
        del self._encodings[encoding.item.digest]
        return VisionEncodingFailed(error, sorted({holder.request.id for holder in encoding.holders}))

    def _release_unused(self) -> None:
        """Features of whoever has computed its prompt, or ended, are nobody's."""
        for digest, encoding in list(self._encodings.items()):
            for holder in [holder for holder in encoding.holders if holder.ended or holder.decoding]:
                encoding.holders.discard(holder)
                if holder.prompt_media is not None:
                    holder.prompt_media.features.clear()
            if not encoding.holders:
                del self._encodings[digest]
                encoding.left.set()
                if encoding.pixels is not None:
                    encoding.pixels.cancel()
                if encoding.features is not None:
                    self._cached[digest] = encoding.features


class VisionEncodingFailed(Exception):
    """An item of these requests cannot be encoded."""

    def __init__(self, error: IngotError, requests: list[str]) -> None:
        super().__init__(str(error))
        self.error, self.requests = error, requests


def _refuse_decoding(needed: DecodingMemory) -> None:
    """Raises RequestTooLarge where no worker would ever be given so much."""
    aside = worker.pixel_pool.memory
    if needed.memory <= aside:
        return
    width, height = needed.size
    largest = needed.largest(aside)
    advice = "" if largest is None else f"Send it as at most {largest.width} by {largest.height}, or "
    raise RequestTooLarge(
        f"Decoding {width} by {height} pixels takes {_mb(needed.memory)}, of {_mb(aside)} that are set aside for it. "
        f"{advice}{MORE_MEMORY if advice else MORE_MEMORY.capitalize()}.",
        param="messages",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


TokenSpan = tuple[TokenSequence, int, int]
"""Tokens of a sequence: the index of the first, and how many."""


def visual_inputs(spans: Iterable[TokenSpan]) -> VisualInputs | None:
    """The features of a forward pass over these spans, one behind the other; None where no token stands for any."""
    positions: list[int] = []
    rows: list[tuple[mx.array, ...]] = []
    number, added = 0, False
    for sequence, begin, count in spans:
        media = sequence.prompt_media
        for digest, features, at in () if media is None else media.seen(begin, begin + count):
            assert media is not None
            features_of_item = media.features[digest]
            added = features_of_item.added  # as those of all others of this model
            rows.append(tuple(array[features.start : features.stop] for array in features_of_item.arrays))
            positions += range(number + at.start - begin, number + at.stop - begin)
        number += count
    if not rows:
        return None
    joined = [each[0] if len(each) == 1 else mx.concatenate(list(each)) for each in zip(*rows, strict=True)]
    return VisualInputs(mx.array(positions, dtype=mx.int32), joined[0], tuple(joined[1:]), added)


VISION_SHARE = 1 / 8
"""Of what the weights leave, the most that is set aside for vision."""
LEAST_DECODING_BYTES = 320 << 20
"""Enough for a large photograph, a page or a video, where that is no more than a quarter of what is free."""


def decoding_memory(free: int) -> int:
    """For the processes that decode images, video and PDFs."""
    return max(0, min(bounds.PIXEL_MEMORY, max(int(free * VISION_SHARE), min(LEAST_DECODING_BYTES, free // 4))))


def make_vision_memory(largest: Sequence[EncodingBytes], free: int) -> VisionMemory:
    """Enough for the `largest` image that the model is shown, twice, and for a video, if that is no more than a share
    of what is free; half of it for features, so that many images, or those of several requests, are held at once.
    Decoding has a share of its own."""
    most = int(free * VISION_SHARE)
    image, *videos = largest
    of_images = 2 * (image.pixels + image.work)
    work = min(max([of_images, *(video.pixels + video.work for video in videos)]), most // 2)
    features = min(max([8 * image.features, of_images, *(video.features for video in videos)]), most // 2)
    return VisionMemory(work, features, decoding_memory(free))

"""The vision encoder at work between steps: pixels in threads, the encoder in slices, features cached by content.

A sequence that needs features waits without holding up others, and books the memory for all of them at once, so
that nobody waits for memory that only waiting ones hold. Features that nobody needs any more stay until room is
needed. `visual_inputs` are the features that a forward pass is given. For the engine thread alone, but that pixels
are made in others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import mlx.core as mx

from ingot.engine.sequence import TokenSequence
from ingot.errors import IngotError, RequestTooLarge
from ingot.kernels.device import is_device_lost
from ingot.media import worker
from ingot.media.images import DecodingMemory
from ingot.media.items import MediaItem
from ingot.models.vision.tower import EncodingSlices, PixelArray, VisionFeatures, VisionTower, VisualInputs

log = logging.getLogger("ingot.engine")

PIXEL_THREADS, PIXEL_THREADS_EACH = 8, 6
"""That wait for workers to unpack pictures and clips, in all and for one tenant."""
SLICE_TIME_DECAY = 0.9
"""What is left, slice by slice, of the longest slice's time in what is expected of the next."""
PIXEL_PAUSE_S = 0.005
VISION_FAILED = "The picture or clip could not be looked at; the server's log says why"


@dataclass(frozen=True, slots=True)
class VisionMemory:
    """Bytes that are set aside for looking: for pixels and what the tower holds while it runs, for features, and for
    the processes that unpack files."""

    work: int
    features: int
    unpacking: int = 0

    @property
    def total(self) -> int:
        return self.work + self.features + self.unpacking + (worker.header_pool.memory if self.unpacking else 0)

    def refuse(self, items: Iterable[MediaItem], tower: VisionTower) -> None:
        """Raises TooLarge for what cannot be looked at within them."""
        features = 0
        for item in {item.digest: item for item in items}.values():
            needs = tower.needs(item.layout)
            features += needs.features
            _refuse_decoding(item.source.unpacking(tower.views(item.source.size, item.layout)))
            if needs.pixels + needs.work > self.work:
                raise RequestTooLarge(
                    f"Looking at one of the pictures or clips takes {_mb(needs.pixels + needs.work)}, of "
                    f"{_mb(self.work)} that are set aside for it. Send a smaller one, or ask for fewer pixels.",
                    param="messages",
                )
        if features > self.features:
            raise RequestTooLarge(
                f"What is seen in the request's pictures and clips takes {_mb(features)}, of {_mb(self.features)} that "
                "are set aside for it. Send fewer or smaller ones.",
                param="messages",
            )


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """What a model sees with, and what memory that may take."""

    tower: VisionTower
    memory: VisionMemory

    def refuse(self, media: Iterable[Iterable[MediaItem]]) -> None:
        """Raises TooLarge for prompts with more than can be looked at, before anything is unpacked."""
        for items in media:
            self.memory.refuse(items, self.tower)


@dataclass(eq=False, slots=True)
class _EncodedItem:
    """An item that somebody waits for or holds features of. Its bytes are booked."""

    item: MediaItem
    nbytes: int
    tenant: str  # who asked first
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
        self._looks: OrderedDict[bytes, _EncodedItem] = (
            OrderedDict()
        )  # those that somebody holds, in the order of their asking
        self._kept: OrderedDict[bytes, VisionFeatures] = OrderedDict()  # the others, the longest unused first
        self._threads = ThreadPoolExecutor(PIXEL_THREADS, thread_name_prefix="ingot-pixels")
        worker.pixel_pool.lend(vision_encoder.memory.unpacking)
        self._expected_s = 0.0  # of the next slice
        self.runs = 0
        """How often the tower was run."""
        self.asked = self.found = 0
        """Pictures and clips that a prompt first came with, and those whose features were there or on their way."""

    def ready(self, sequence: TokenSequence, known: int) -> bool:
        """Whether a sequence of which `known` tokens will be taken over has the features of all the others. If not, it
        will, once there is memory for them."""
        sight = sequence.sight
        if sight is None:
            return True
        wanted = sight.ahead(known)
        if all(item.digest in sight.features for item in wanted):
            return True
        self._let_go()
        if not all(sequence in self._holders(item) for item in wanted) and not self._book(sequence, wanted):
            return False
        looks = [self._looks[item.digest] for item in wanted]
        found = {look.item.digest: look.features for look in looks if look.features is not None}
        if len(found) < len(looks):
            return False
        sight.features.update(found)
        return True

    def advance(self, seconds: float) -> bool:
        """Run the tower for no longer than that, as slices before it let expect, but for a slice at least. Whether
        there was something to do.

        Raises LookFailed with who asked for what cannot be looked at.
        """
        now = time.monotonic()
        end = now + seconds
        worked = False
        for look in self._pending():
            while look.features is None:
                self._slice(look)
                began, now = now, time.monotonic()
                self._expected_s = max(now - began, SLICE_TIME_DECAY * self._expected_s)
                worked = True
                if now + self._expected_s > end:
                    return worked
        return worked

    def pause(self) -> None:
        """Nothing can be computed: wait a little for pixels."""
        waited = [look.pixels for look in self._looks.values() if look.pixels is not None]
        if waited:
            wait(waited, PIXEL_PAUSE_S)

    def check(self) -> None:
        self._let_go()
        assert self._booked + self._kept_bytes <= self._memory.features, "features take more than is set aside for them"
        assert all(look.holders for look in self._looks.values()), "somebody looks for nobody"

    def close(self) -> None:
        for look in self._looks.values():
            look.left.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        worker.pixel_pool.lend(-self._memory.unpacking)

    def _holders(self, item: MediaItem) -> set[TokenSequence]:
        look = self._looks.get(item.digest)
        return set() if look is None else look.holders

    @property
    def _booked(self) -> int:
        return sum(look.nbytes for look in self._looks.values())

    @property
    def _kept_bytes(self) -> int:
        return sum(features.nbytes for features in self._kept.values())

    def _book(self, sequence: TokenSequence, wanted: list[MediaItem]) -> bool:
        """Have all that a sequence wants looked at, if memory holds it beside what others want."""
        fresh = [item for item in wanted if item.digest not in self._looks]
        needed = {item.digest: self._tower.needs(item.layout).features for item in fresh}
        if self._booked + sum(needed.values()) > self._memory.features:
            return False
        if sequence.preemptions == 0 and sequence.index % sequence.request.n == 0:
            self.asked += len(wanted)
            self.found += sum(item.digest in self._looks or item.digest in self._kept for item in wanted)
        for item in fresh:
            features = self._kept.pop(item.digest, None)
            asked = sequence.request
            self._looks[item.digest] = _EncodedItem(
                item, needed[item.digest], asked.tenant, asked.id, features=features
            )
        for item in wanted:
            self._looks[item.digest].holders.add(sequence)
        while self._kept and self._booked + self._kept_bytes > self._memory.features:
            self._kept.popitem(last=False)
        return True

    def _pending(self) -> list[_EncodedItem]:
        """Those whose work is under way, then those whose pixels are there."""
        self._let_go()
        looks = [look for look in self._looks.values() if look.features is None]
        self._unpack(looks)
        begun = [look for look in looks if look.slices is not None]
        return begun + [look for look in looks if look.pixels is not None and look.pixels.done()]

    def _unpack(self, looks: list[_EncodedItem]) -> None:
        """Have pixels made for the next ones, as far as there is memory for them beside the tower's work. Tenants take
        turns, and none has all threads."""
        needs = {look: self._tower.needs(look.item.layout) for look in looks}
        held = sum(needs[look].pixels for look in looks if look.pixels is not None or look.slices is not None)
        work = max((each.work for each in needs.values()), default=0)
        running = Counter(look.tenant for look in looks if look.pixels is not None and not look.pixels.done())
        waiting = [look for look in looks if look.pixels is None and look.slices is None]
        while waiting and running.total() < PIXEL_THREADS:
            look = min(waiting, key=lambda each: running[each.tenant])
            if running[look.tenant] >= PIXEL_THREADS_EACH:
                return
            if held and held + needs[look].pixels + work > self._memory.work:
                return
            look.pixels = self._threads.submit(self._made, look)
            waiting.remove(look)
            running[look.tenant] += 1
            held += needs[look].pixels

    def _made(self, look: _EncodedItem) -> PixelArray:
        """Its pixels, in a thread that waits for a worker; that is killed where nobody waits for them any more."""
        with worker.working_for(worker.MediaClient(look.tenant, lambda: not look.left.is_set(), look.request)):
            return self._tower.pixels(look.item)

    def _slice(self, look: _EncodedItem) -> None:
        try:
            if look.slices is None:
                assert look.pixels is not None
                look.slices = self._tower.look(look.pixels.result(), look.item.layout)
                look.pixels = None
                self.runs += 1
            mx.eval(*next(look.slices))
        except StopIteration as done:
            features: VisionFeatures = done.value
            mx.eval(*features.arrays)
            look.features, look.slices = features, None
        except IngotError as error:
            raise self._failed(look, error) from error
        except Exception as error:  # of a tower or a decoder, in whatever way
            if is_device_lost(error):
                raise
            log.exception("a picture or clip could not be looked at")
            raise self._failed(look, IngotError(VISION_FAILED)) from error

    def _failed(self, look: _EncodedItem, error: IngotError) -> VisionEncodingFailed:
        del self._looks[look.item.digest]
        return VisionEncodingFailed(error, sorted({holder.request.id for holder in look.holders}))

    def _let_go(self) -> None:
        """Features of whoever has computed its prompt, or ended, are nobody's."""
        for digest, look in list(self._looks.items()):
            for holder in [holder for holder in look.holders if holder.ended or holder.decoding]:
                look.holders.discard(holder)
                if holder.sight is not None:
                    holder.sight.features.clear()
            if not look.holders:
                del self._looks[digest]
                look.left.set()
                if look.pixels is not None:
                    look.pixels.cancel()
                if look.features is not None:
                    self._kept[digest] = look.features


class VisionEncodingFailed(Exception):
    """Something cannot be looked at, of these requests."""

    def __init__(self, error: IngotError, requests: list[str]) -> None:
        super().__init__(str(error))
        self.error, self.requests = error, requests


def _refuse_decoding(needed: DecodingMemory) -> None:
    """Raises TooLarge where no worker would ever be given so much."""
    aside = worker.pixel_pool.memory
    if needed.memory <= aside:
        return
    width, height = needed.size
    largest = needed.largest(aside)
    advice = "" if largest is None else f"Send it as at most {largest.width} by {largest.height}, or "
    raise RequestTooLarge(
        f"Unpacking {width} by {height} pixels takes {_mb(needed.memory)}, of {_mb(aside)} that are set aside for it. "
        f"{advice}{'s' if advice else 'S'}erve the model with more --memory.",
        param="messages",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


TokenSpan = tuple[TokenSequence, int, int]
"""Tokens of a sequence: the first one's place, and how many."""


def visual_inputs(stretches: Iterable[TokenSpan]) -> VisualInputs | None:
    """Of a pass over these tokens, one stretch behind another; None where none of them stands for anything seen."""
    places: list[int] = []
    taken: list[tuple[mx.array, ...]] = []
    number = 0
    for sequence, begin, count in stretches:
        sight = sequence.sight
        for digest, features, at in () if sight is None else sight.seen(begin, begin + count):
            assert sight is not None
            shown = sight.features[digest]
            taken.append(tuple(array[features.start : features.stop] for array in shown.arrays))
            places += range(number + at.start - begin, number + at.stop - begin)
        number += count
    if not taken:
        return None
    joined = [each[0] if len(each) == 1 else mx.concatenate(list(each)) for each in zip(*taken, strict=True)]
    return VisualInputs(mx.array(places, dtype=mx.int32), joined[0], tuple(joined[1:]))

"""Experts that are read when they are needed.

`stream_experts` replaces the experts of a model by slots for some of them, before a weight is read: whatever handles
the model's modules from then on (number formats, kernels, memory) finds mixtures of as many experts as there are slots.
A `StreamedExperts` module around them sees which experts the tokens of a pass have chosen, has those read that are in
no slot, and gives the products the slots' numbers. Where a pass has more experts than there are slots, it is computed
in rounds: each pair of a token and an expert in one of them, to the same bits.

What the next layer's tokens will choose is guessed by that layer's router from this layer's hidden states, and read
while this layer computes. Choices and guess are evaluated together: a mixture costs one wait for the device, and none
where all experts of a layer have slots. On GPUs products are launched before that wait, with the experts that are
there, and once more if one was not. Where passes mostly find all experts in slots, one is computed with those and
checked once, at its end (`CheckedOnce`). A slot is only written once everything that reads it was evaluated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.kernels.gpu.device_copies import DeviceCopies
from ingot.models.experts.files import (
    LONGEST_WAIT_S,
    MOST_GUESSES,
    READERS,
    ExpertFiles,
    ExpertRead,
    ExpertReaders,
    SpareMemory,
    SparePiece,
    WeightsUnreadable,
)
from ingot.models.experts.guessing import FEW_TOKENS, GuessTrial, RouterGuess, by_likelihood
from ingot.models.experts.kept import KEPT, KeptLayer
from ingot.models.experts.slots import NOWHERE, ExpertSlots
from ingot.models.experts.weights import BesideSlot, SlotWeights, StoredExperts
from ingot.models.files.drive_speed import MIB, read_speed
from ingot.models.layers.mlp import GatedExperts, UnsortedExperts
from ingot.observe.metrics import ExpertStats

SWITCH_S: Final = 0.0005
"""How long a thread of this process runs Python before another may: readers and the engine thread wait for each other
several times in a step."""
PATIENCE_S: Final = 0.05
"""Nothing else is done while a read takes no longer."""


LEARNING: Final = 0.1
"""How much of what is known of a layer's guesses the last one makes up."""
LEAST_RIGHT: Final = 0.4
"""Guesses that are right less often are not acted on."""
MOSTLY: Final = 0.5
"""Products are launched early in layers of which all experts are there more often than that."""
HELD_BYTES: Final = 1 << 17
"""Outputs that are held until slots are written to; larger ones may be those of a prompt."""


Products = Callable[[mx.array, mx.array], mx.array]
"""Of tokens [..., size] and the slots of their experts [..., top]: [..., top, size]."""


class StreamedExperts(nn.Module):
    """Stands before the products of a layer's experts, which have slots for some of these."""

    def __init__(self, products: nn.Module, layer: LayerExperts) -> None:
        super().__init__()
        self.products = products
        self._layer = layer

    @property
    def layer(self) -> LayerExperts:
        return self._layer

    @property
    def count(self) -> int:
        """Of all experts."""
        return self._layer.slots.slot_of.size

    def __call__(self, x: mx.array, indices: mx.array, multiply: Products | None = None) -> mx.array:
        """`multiply` does what the products do, in the same memory."""
        return self._layer.compute(x, indices, self.products, multiply or self.products)


class ExpertStore:
    """All experts of a model. Only the engine thread may use it, except for `stats`."""

    def __init__(
        self,
        files: ExpertFiles,
        *,
        form: Hashable = None,
        copies: DeviceCopies | None = None,
        launches_early: bool = False,
    ) -> None:
        """Until `read_ahead` is set, nothing is guessed. `form` is all that the numbers in slots depend on. `copies`
        bring what was read to the device, where it has memory of its own. Products that are launched early cost next
        to nothing where they are in vain."""
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self.readers = ExpertReaders(files)
        self.read_ahead = False
        self.meanwhile: Callable[[], None] = lambda: None
        """Called again and again while reads take long: other models go on."""
        self.layers: list[LayerExperts] = []
        self.copies, self.launches_early = copies, launches_early
        self.spare = SpareMemory() if copies is None else SpareMemory(lambda size: SparePiece(*copies.pinned(size)))
        self.unchecked: list[UncheckedChoice] | None = None
        """Of the open pass, if it is checked at its end."""
        self.repeats = False
        """Whether the open pass was computed before, but without an expert: what it needs was begun to be read."""
        self.files, self._form = files, form
        self._counts = dict.fromkeys(("hits", "predicted", "misses", "wasted", "rounds"), 0)
        self._waited_s = 0.0

    @property
    def stats(self) -> ExpertStats:
        readers = self.readers
        return ExpertStats(
            self.share,
            **self._counts,
            bytes_read=readers.bytes_read,
            waited_s=self._waited_s,
            reading_s=readers.reading_s,
        )

    @property
    def read_ahead(self) -> bool:
        """Whether the next layer's experts are guessed and read while a layer is computed, where that is found to be
        faster. Else nothing overlaps: experts are read one after another when they are needed."""
        return self._read_ahead

    @read_ahead.setter
    def read_ahead(self, ahead: bool) -> None:
        self._read_ahead, self.readers.most, self.trial = ahead, READERS if ahead else 1, GuessTrial()

    @property
    def share(self) -> float:
        """Of all experts, those that fit in the slots."""
        return sum(layer.slots.count for layer in self.layers) / sum(layer.slots.slot_of.size for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in the files, of the layer with the largest."""
        return max(layer.stored.bytes_of_one for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes in the files of all experts that a token has."""
        return sum(
            layer.stored.bytes_of_one * (layer.guess.top if layer.guess is not None else 1) for layer in self.layers
        )

    @property
    def reads(self) -> int:
        """Experts that were not in memory when they were needed, so far."""
        return self._counts["misses"] + self._counts["predicted"]

    def drive_speed(self) -> float | None:
        """Bytes a second at which experts are read that the system does not have in memory; None if that is not
        known."""
        return read_speed(self.files.largest, size=min(MIB, self.expert_bytes))

    def count(self, **more: int) -> None:
        for name, n in more.items():
            self._counts[name] += n

    def wait_for(self, reads: Sequence[ExpertRead]) -> None:
        """Until all of them are read. Raises WeightsUnreadable."""
        began = time.monotonic()
        for read in reads:
            self.readers.hurry(read)
        for read in reads:
            while not read.done.wait(PATIENCE_S):
                if time.monotonic() - began > LONGEST_WAIT_S:
                    waited = f"{LONGEST_WAIT_S:.0f} seconds"
                    raise WeightsUnreadable(f"The drive has not answered for {waited}, from which experts are read.")
                self.meanwhile()
        self._waited_s += time.monotonic() - began
        for read in reads:
            if read.error is not None:
                raise WeightsUnreadable(read.error.message, retry_after=read.error.retry_after)

    def check(self) -> None:
        """Raises AssertionError if tables are inconsistent."""
        for layer in self.layers:
            layer.slots.check()

    def close(self) -> None:
        """The last call. The slots are kept where there is room for them, with what is in them."""
        kept = [layer.leave() for layer in self.layers]
        self.readers.close()
        if all(layer is not None for layer in kept):
            KEPT.put(self._form, self.files.folder, [layer for layer in kept if layer is not None])
        self.files.close()
        self.spare.clear()


@dataclass(frozen=True, slots=True)
class UncheckedChoice:
    """What a layer's tokens have chosen in a pass that is checked at its end."""

    layer: LayerExperts
    chosen: mx.array
    slots: np.ndarray
    """Of each expert, or NOWHERE, when the products were asked for."""


@dataclass(eq=False)
class Arriving:
    """An expert that is being read into a slot, or into memory from where it is put there."""

    expert: int
    slot: int
    read: ExpertRead
    victim: int | None = None
    """Who is in the slot, and stays there until it is written to: the read may be called off before."""


class LayerExperts:
    """The experts of a layer."""

    def __init__(
        self, store: ExpertStore, stored: StoredExperts, slots: ExpertSlots, guess: RouterGuess | None
    ) -> None:
        self._store, self.stored, self.slots, self.guess = store, stored, slots, guess
        self.number = len(store.layers)
        self._weights: SlotWeights | None = None
        self._products: nn.Module | None = None
        self._arriving: dict[int, Arriving] = {}
        self._unused: set[int] = set()  # read ahead, and not used since
        self._guessed: set[int] | None = None  # for this pass
        self._right = 1.0  # of what was needed, the part that had been guessed: of late, on average
        self._all_there = 1.0  # the share of passes that needed no read: of late, on average
        self._output: mx.array | None = None  # of what read slots last, which may not have been evaluated

    def resume(self, kept: KeptLayer) -> nn.Module:
        """Go on with the slots of the same model, which was unloaded; returns the products that read them."""
        self._weights = kept.weights
        kept.weights.move_to(self._store.files, self._store.spare)
        products: nn.Module = kept.products
        return products

    def leave(self) -> KeptLayer | None:
        """Let go of the model, which knows this layer. The last call. Returns the slots, if they were used and nothing
        is on its way into them."""
        for each in list(self._arriving.values()):
            if not self._call_off(each) and each.read.done.wait(PATIENCE_S):
                with suppress(WeightsUnreadable):
                    self.settle([each])
        self._wait_for_output()
        weights, products = self._weights, self._products
        self.guess, self._weights, self._products = None, None, None
        if weights is None or products is None or self._arriving:
            return None
        return KeptLayer(products, self.slots, weights)

    def compute(self, x: mx.array, indices: mx.array, owner: nn.Module, products: Products) -> mx.array:
        """The products of each token and its experts, as they are with all experts in memory. `owner` has the slots."""
        self._products, unchecked = owner, self._store.unchecked
        if unchecked is not None and not self.slots.is_complete:
            unchecked.append(UncheckedChoice(self, indices.astype(mx.int32), self.readable_slots(waits=False)))
            return self._hold(products(x, self.slots.table[indices]))
        if self._weights is None:
            self._weights = self._slot_weights(owner)
            if self.slots.count == self.slots.slot_of.size:  # all of them can be there
                self.settle(self._read(np.flatnonzero(self.slots.slot_of == NOWHERE).tolist(), (), ahead=False))
        following = None if unchecked is not None else self._following()
        guessed = [] if following is None or following.guess is None else [following.guess(x)]
        if self.slots.is_complete:  # nothing is written there, and nobody has to know which are used
            y = products(x, self.slots.table[indices])
            if following is not None:
                mx.async_eval(guessed)
                mx.async_eval(y)
                following.read_ahead(*map(np.array, guessed))
            return y
        # A copy that only the host reads: reading moves an array's memory on NVIDIA GPUs, where kernels may be reading
        # the other one, unless it has no more than eight bytes.
        choice = indices.astype(mx.uint8 if self.slots.slot_of.size <= 256 else mx.uint16)
        mx.async_eval(choice, guessed)
        may_be_all = self._store.launches_early and self._all_there > MOSTLY and not self._arriving
        is_early = may_be_all and indices.size <= FEW_TOKENS * indices.shape[-1]
        early = self._launch(products(x, self.slots.table[indices])) if is_early else None
        mx.eval(choice, guessed)
        chosen = np.array(choice)
        first, *others = self._rounds(self._note_choice(chosen))
        reads = self._begin_reading(first)
        if following is not None:
            following.read_ahead(*map(np.array, guessed))
        is_all_there = not others and not reads
        self._all_there += LEARNING * (is_all_there - self._all_there)
        if early is not None and is_all_there:
            return early
        self.settle(reads)
        if not others:
            return self._launch(products(x, self.slots.table[indices]))
        y = self._launch(self._products_of(x, chosen, first, products, None))
        for some in others:
            self.settle(self._begin_reading(some))
            y = self._launch(self._products_of(x, chosen, some, products, y))
        return y

    @property
    def guesses(self) -> bool:
        """Whether guesses of what it needs are acted on."""
        store = self._store
        return store.read_ahead and store.trial.guesses and not self.slots.is_complete

    @property
    def is_reading(self) -> bool:
        """Whether anything is on its way into its slots."""
        return not all(each.read.done.is_set() for each in self._arriving.values())

    def has_room_for(self, chosen: np.ndarray) -> bool:
        """Whether all experts of a choice can be in slots at once."""
        return chosen.size <= self.slots.count or np.unique(chosen).size <= self.slots.count

    def readable_slots(self, *, waits: bool) -> np.ndarray:
        """The slot of each expert, or NOWHERE, for products that are launched before the choice is known. What is being
        read is one of these only if it `waits` for it."""
        for each in list(self._arriving.values()):
            if waits or each.read.done.is_set():
                with suppress(WeightsUnreadable):  # who needs it will know
                    self.settle([each])
        victims = [each.victim for each in self._arriving.values() if each.victim is not None]
        found = self.slots.slot_of.copy()
        found[victims] = NOWHERE
        return found

    def begin_missing(self, chosen: np.ndarray, slots: np.ndarray) -> list[Arriving] | None:
        """A choice of which products were launched with the experts in these slots: returns the reads of those that
        were not; None if all were."""
        reads = [] if self.slots.is_complete else self._begin_reading(self._note_choice(chosen))
        return reads if (slots[chosen] == NOWHERE).any() else None

    def launch_there(self, x: mx.array, indices: mx.array, owner: nn.Module, products: Products) -> mx.array:
        """The products of tokens and experts that are all in slots."""
        return self._launch(products(x, self.slots.table[indices]))

    def _note_choice(self, chosen: np.ndarray) -> list[int]:
        """Returns the experts that a pass has chosen."""
        wanted = self.slots.note_uses(chosen)
        if self._arriving:
            self._call_off_wrong(set(wanted))
        if self._guessed is not None:
            self._right += LEARNING * (len(self._guessed.intersection(wanted)) / len(wanted) - self._right)
            self._guessed = None
        return wanted

    def _slot_weights(self, products: nn.Module) -> SlotWeights:
        store = self._store
        if store.copies is not None:  # memory is pinned on this thread alone
            store.spare.reserve(2 * READERS, self.stored.most_spare)
        return SlotWeights(products, self.stored, store.files, store.spare, store.copies)

    def _following(self) -> LayerExperts | None:
        """The next layer, if its experts are to be guessed."""
        layers, number = self._store.layers, self.number + 1
        guesses = self._store.read_ahead and self._store.trial.guesses and not self._store.repeats
        following = layers[number] if guesses and number < len(layers) else None
        if following is None or following.guess is None or following._weights is None:
            return None
        return None if following.slots.count == following.slots.slot_of.size else following

    def _rounds(self, wanted: list[int]) -> Iterator[list[int]]:
        """The experts of each round; those first that are in memory, or on their way."""
        most = self.slots.count
        if len(wanted) <= most:
            yield wanted
            return
        places = self.slots.slot_of
        experts = sorted(wanted, key=lambda each: 0 if places[each] != NOWHERE else 1 if each in self._arriving else 2)
        self._store.count(rounds=-(-len(experts) // most) - 1)
        for begin in range(0, len(experts), most):
            yield experts[begin : begin + most]

    def _begin_reading(self, experts: Sequence[int]) -> list[Arriving]:
        """Have those read that are not in memory; returns all that are on their way. What failed while nobody waited
        for it is read again."""
        if self._arriving:
            self._save(set(experts))
        places = self.slots.slot_of[experts].tolist()
        if NOWHERE not in places and not self._arriving and not self._unused:
            self._store.count(hits=len(experts))
            return []
        lacking = [
            each for each, slot in zip(experts, places, strict=True) if slot == NOWHERE and each not in self._arriving
        ]
        coming = [self._arriving[each] for each in experts if each in self._arriving]
        early = sum(each in self._arriving or each in self._unused for each in experts)
        self._store.count(hits=len(experts) - len(lacking) - early, predicted=early, misses=len(lacking))
        self._unused.difference_update(experts)
        begun = self._read(lacking, set(experts), ahead=False)
        while len(begun) < len(lacking):  # slots that wrong guesses take
            self._settle_others(set(experts))
            begun += self._read(lacking[len(begun) :], set(experts), ahead=False)
        return [*coming, *begun]

    def _save(self, needed: set[int]) -> None:
        """Experts that are needed stay where they are, if nothing was written over them yet."""
        for each in list(self._arriving.values()):
            if each.read.done.is_set() and each.read.error is not None:
                self._forget(each)
            elif each.victim in needed and self._call_off(each) is False:
                self.slots.drop(each.victim)
                each.victim = None

    def _call_off_wrong(self, needed: set[int]) -> None:
        """Reads of what was guessed, and is not needed, if they have not gone too far."""
        for each in list(self._arriving.values()):
            if each.expert not in needed and each.read.ahead:
                self._call_off(each)

    def _call_off(self, arriving: Arriving) -> bool:
        """Returns whether its slot is as it was."""
        if not self._store.readers.cancel(arriving.read):
            return False
        self._forget(arriving)
        return True

    def _forget(self, arriving: Arriving) -> None:
        """It will not come. Who is in its slot stays, unless something was written there."""
        del self._arriving[arriving.expert]
        self._unused.discard(arriving.expert)
        if arriving.read.writes and arriving.victim is not None:
            self.slots.drop(arriving.victim)

    def _settle_others(self, kept: set[int]) -> None:
        """Wait for a read that nobody waits for."""
        other = next(each for each in self._arriving.values() if each.expert not in kept)
        try:
            self.settle([other])
        except WeightsUnreadable:
            if not other.read.done.is_set():  # its slot is still being written to
                raise

    def _read(self, experts: Sequence[int], kept: Collection[int], *, ahead: bool) -> list[Arriving]:
        """Begin to read as many of the experts as there are slots for."""
        if not experts:
            return []
        assert self._weights is not None
        busy = {each.slot for each in self._arriving.values()}
        found = self.slots.replaceable(len(experts) + len(busy), kept)
        found = [slot for slot in found if slot not in busy][: len(experts)]
        self._wait_for_output()
        begun = []
        for expert, slot in zip(experts, found, strict=False):
            arriving = Arriving(expert, slot, self._weights.read(expert, slot, ahead=ahead))
            before = int(self.slots.expert_in[slot])
            if before != NOWHERE and ahead:
                arriving.victim = before
            elif before != NOWHERE:
                self._evict(before)
            self._arriving[expert] = arriving
            begun.append(arriving)
        self._store.readers.submit(each.read for each in begun)
        return begun

    def _evict(self, expert: int) -> None:
        self.slots.drop(expert)
        if expert in self._unused:
            self._unused.discard(expert)
            self._store.count(wasted=1)

    def settle(self, arriving: Sequence[Arriving]) -> None:
        """Wait for reads, and put what they read into the slots. Raises WeightsUnreadable; what was read before is
        there nevertheless."""
        if not arriving:
            return
        assert self._weights is not None
        try:
            self._store.wait_for([each.read for each in arriving])
        finally:
            for each in arriving:
                if not each.read.done.is_set():
                    continue
                if each.read.error is not None:
                    self._forget(each)
                    continue
                del self._arriving[each.expert]
                if each.victim is not None:
                    self._evict(each.victim)
                if not each.read.delivered:
                    assert isinstance(each.read.room, BesideSlot)
                    self._weights.install(each.slot, each.read.room)
                self.slots.put(each.expert, each.slot)

    def read_ahead(self, guessed: np.ndarray, *, at_once: int = MOST_GUESSES) -> None:
        """Read what is not in memory of the experts that tokens were guessed to choose [..., n], the likeliest of each
        first, so many at once; unless guesses are mostly wrong here, so that they would make others go for nothing."""
        order = by_likelihood(guessed)[: self.slots.count]
        self._guessed = set(order)
        if self._right < LEAST_RIGHT:
            return
        lacking = [each for each in order if self.slots.slot_of[each] == NOWHERE and each not in self._arriving]
        landed = [each for each in self._arriving.values() if each.read.done.is_set() and each.expert not in order]
        with suppress(WeightsUnreadable):  # nobody needs them
            self.settle(landed)  # guessed wrongly before: they take slots as any others
        self._store.readers.most_guesses = at_once
        begun = self._read(lacking, set(order), ahead=True)
        self._unused.update(each.expert for each in begun)

    def _products_of(
        self, x: mx.array, chosen: np.ndarray, experts: Sequence[int], products: Products, before: mx.array | None
    ) -> mx.array:
        """Of the pairs whose expert is in this round; the others keep what they have from the rounds before."""
        is_mine = np.zeros(self.slots.slot_of.size, bool)
        is_mine[experts] = True
        mine = is_mine[chosen]
        skips = isinstance(products, GatedExperts | UnsortedExperts)
        other = NOWHERE if skips else self.slots.slot_of[experts[0]]
        y: mx.array = products(x, mx.array(np.where(mine, self.slots.slot_of[chosen], other).astype(np.int32)))
        return y if before is None else mx.where(mx.array(mine)[..., None], y, before)

    def _launch(self, y: mx.array) -> mx.array:
        """Have the device begin with what reads slots."""
        mx.async_eval(self._hold(y), self._output)
        return y

    def _hold(self, y: mx.array) -> mx.array:
        """Until it is evaluated, slots are not written to."""
        self._output = y if y.nbytes <= HELD_BYTES else y.reshape(-1)[:1] + 0
        return y

    def _wait_for_output(self) -> None:
        """Nothing reads slots any more."""
        if self._output is not None:
            mx.eval(self._output)
            self._output = None

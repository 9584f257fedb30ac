"""The prefix cache at work in the step loop: what was computed before is reused.

A sequence that is admitted starts behind the longest cached prefix; what it computes is cached as it goes, at the
ends of messages, where prompts part, at strides, and at its own end. Cached records give way to running sequences
at once: they are compressed where a codec is set (`RecordCompressor`), offloaded to disk where there is one
(`offload`), or evicted. Compression is done on the engine thread, between steps: it may take a small part of the
time, and no more at once than a short step does. The engine thread's alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final, Protocol, TypeVar

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import RAW
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.record_file import tenant_digest
from ingot.cache.forward_batch import Row
from ingot.cache.pages import join_tables
from ingot.cache.prefix_eviction import CLOSE_TOKENS
from ingot.cache.prefix_index import NO_COMPRESSOR, SNIPPET_TOKENS, PrefixIndex, PrefixMatch, ResumeNeeds
from ingot.cache.prefix_index import CacheTier as Where
from ingot.cache.prefix_tree import CacheOwner, PrefixNode, common_prefix_length
from ingot.cache.record_encoding import LossyEncoding, RecordEncoding
from ingot.cache.records import Record, RecordForm, UnpagedRecord, restore_row, take_record
from ingot.engine.memory_budget import MemoryBudget, PagesByForm
from ingot.engine.offload import DiskTier, NoOffloadTier, OffloadTier
from ingot.engine.request import CacheReason, CacheReport, Request
from ingot.engine.sequence import GAP_KEY, TokenSequence
from ingot.engine.step_costs import StepCosts

T = TypeVar("T")
CACHE_STRIDE = 512
"""Tokens of a prompt after which what was computed is kept, so that a cancelled or a shared prompt is not lost."""
CHECKPOINT_STRIDE = 2048
"""The same where a sequence can only be resumed at checkpoints, which cost much and mostly stand at messages' ends."""
LANDMARK_MESSAGES = 2
"""Messages' ends that other conversations are likely to share: behind the system prompt and the first message."""
PINNED_SHARE = 0.5
"""Of the memory for kept prefixes, the most that pinned ones may take."""
WORTH_WAITING_TOKENS = 64
"""A sequence waits for another one's prompt when at least this many tokens of it are its own as well."""
MOST_STOPS = 8
"""Places besides its messages' ends at which a prompt stops for others."""


def resume_needs(rows: BatchState) -> ResumeNeeds:
    windows = tuple((group.number, group.window) for group in rows.groups if group.window is not None)
    return ResumeNeeds("recurrent" in rows.kinds, windows)


@dataclass
class PrefixCacheCounts:
    """What taking over was good for so far."""

    prompts: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0

    def add(self, tokens: int, matched: int) -> None:
        self.prompts += 1
        self.hits += matched > 0
        self.prompt_tokens += tokens
        self.matched_tokens += matched


class PrefixCache:
    def __init__(
        self,
        rows: BatchState,
        budget: MemoryBudget,
        costs: StepCosts,
        limit: int,
        encoding: RecordEncoding | None = None,
    ) -> None:
        needs = resume_needs(rows)
        self._costs = costs
        self._tier: OffloadTier = NoOffloadTier()
        self.encoding = RecordEncoding(rows) if encoding is None else encoding
        self._compressor = RecordCompressor(self.encoding) if isinstance(self.encoding, LossyEncoding) else None
        self.index = PrefixIndex(
            needs,
            self._seconds,
            spill=lambda node: self._tier.spill(node),
            compressor=self._compressor or NO_COMPRESSOR,
        )
        self.limit = limit
        self.counts: defaultdict[str, PrefixCacheCounts] = defaultdict(PrefixCacheCounts)  # by tenant
        self.rows, self.needs, self._budget = rows, needs, budget
        rows.when_encoded = self.index.recount
        self._stride = CACHE_STRIDE if needs.anywhere else CHECKPOINT_STRIDE
        self._found: dict[TokenSequence, PrefixMatch] = {}
        self._needed = 0  # bytes that running sequences were last given

    def _seconds(self, tokens: int) -> float:
        """What computing so many takes; 0 where that is not known yet."""
        return self._costs.prefill_ms(tokens) / 1000

    def attach(self, disk: DiskBackend, form: RecordForm) -> None:
        """Keep on disk what memory has no room for. `form` is that of raw records."""
        if self.limit:
            self._tier = DiskTier(
                disk, self.index, self.rows, self.encoding, form, self._seconds, self._make_room, self.owner
            )

    # Planning

    def expect(self, waiting: Many[TokenSequence]) -> None:
        """Get ready what those that wait will take over."""
        self._tier.expect(waiting, lambda sequence: self._uses(sequence.request))

    def admit(self, sequence: TokenSequence) -> None:
        """Let an admitted sequence start behind what is known of it."""
        first = sequence.preemptions == 0
        if first:
            told = self.explain(sequence.request, sequence.keys, "ram")
            # In tokens of the prompt as it was sent, also where not all of them are stored.
            whole, known = len(sequence.whole_prompt), sequence.position(told.known) if sequence.thinned else told.known
            sequence.report = replace(told, prompt_tokens=whole + sequence.produced, known=known)
        if not self._uses(sequence.request):
            return
        owner = self.owner(sequence.request)
        found = self.index.match(owner, sequence.keys, sequence.most_reusable)
        read = self._tier.settle(sequence, found.length)
        if found.length:
            self._found[sequence] = found
        sequence.computed = sequence.kept = found.length
        sequence.codec = found.codec
        sequence.agreed.clear()
        if first:
            sequence.stops = self._stops(sequence, found)
            sequence.cached = found.length
            sequence.report = sequence.report and replace(sequence.report, read=read, codec=found.codec)
            self.counts[owner.tenant].add(len(sequence.tokens), found.length)

    def _stops(self, sequence: TokenSequence, found: PrefixMatch) -> frozenset[int]:
        """Where a prompt should stop besides its messages' ends: where it parts from what is known, as others will part
        there too, and one token before its end, from where the same prompt goes on."""
        if self.needs.anywhere:
            return frozenset()
        last = len(sequence.tokens) - 1
        places = sequence.marks | {found.length}
        for stop in (min(found.known, last), last):
            if not any(stop - CLOSE_TOKENS < place <= stop for place in places):
                places |= {stop}
        return places - sequence.marks - {found.length}

    def explain(self, request: Request, tokens: Many[int], tier: Where = "disk") -> CacheReport:
        """What a prompt of these tokens, as the index knows them, would take over now, from memory alone or from disk
        as well, and why no more."""
        if (reason := self._unused(request)) is not None:
            return CacheReport(len(tokens), 0, 0, reason)
        owner = self.owner(request)
        self._tier.plant(owner, tokens)
        found = self.index.explain(owner, tokens, len(tokens) - 1, tier)
        ours, theirs = (
            _snippet_tokens(tokens[found.known : found.known + SNIPPET_TOKENS]),
            _snippet_tokens(found.theirs),
        )
        codec = self.encoding.name if found.filed else found.codec
        return CacheReport(len(tokens), found.length, found.known, found.reason, ours, theirs, found.filed, codec)

    def _unused(self, request: Request) -> CacheReason | None:
        """Why a request has nothing to do with what is kept, if so."""
        if self.limit == 0:
            return "disabled"
        if not request.cache:
            return "off"
        # A prompt that is scored is computed whole: its logprobs are not part of any record.
        return "scored" if request.sampling.prompt_logprobs is not None else None

    def owner(self, request: Request) -> CacheOwner:
        """Whose prefixes a request takes over. Who wants exact states has some of their own, where others' go through a
        codec."""
        exact = request.exact and (self.encoding.lossy or self.rows.codec is not None)
        return CacheOwner(request.tenant, request.salt, exact, request.lora_digest)

    def _uses(self, request: Request) -> bool:
        return self._unused(request) is None

    def waits(self, sequence: TokenSequence, running: Iterable[TokenSequence]) -> bool:
        """Whether a running sequence is about to compute what this one could take over from it, or it is being read."""
        if not self._uses(sequence.request):
            return False
        return self._tier.waits(sequence) or any(
            self._shares(sequence, other) for other in running if not other.decoding
        )

    def _shares(self, sequence: TokenSequence, other: TokenSequence) -> bool:
        if self.owner(other.request) != self.owner(sequence.request) or not self._uses(other.request):
            return False
        shared = min(_common_tokens(sequence, other), len(sequence.tokens) - 1)
        if not self.needs.anywhere:
            shared = self._stop_within(other, shared)
        return shared - other.kept >= WORTH_WAITING_TOKENS

    def _stop_within(self, other: TokenSequence, shared: int) -> int:
        """The last place within its first `shared` tokens at which a running sequence stops. It is asked to stop there
        where it does so only much earlier, instead of a little later."""
        last = max((place for place in other.marks | other.stops if place <= shared), default=0)
        if shared - max(last, other.computed) < WORTH_WAITING_TOKENS:
            return last
        stops = {stop for stop in other.stops if not shared < stop < shared + WORTH_WAITING_TOKENS} | {shared}
        if len(stops) > MOST_STOPS:
            return last
        other.stops = frozenset(stops)
        return shared

    def next_stop(self, sequence: TokenSequence) -> int:
        """Where the next chunk must end at the latest, so that a checkpoint can be taken there."""
        if self.needs.anywhere or not self._uses(sequence.request):
            return sequence.total
        ahead = (place for place in sequence.marks | sequence.stops if place > sequence.computed)
        return min(ahead, default=sequence.total)

    def reusable_pages(self, sequence: TokenSequence) -> list[PagesByForm]:
        """By group, the pages that a sequence would take over if it were admitted now. Leaves no trace."""
        if not self._uses(sequence.request):
            return []
        found = self._peek(sequence)
        pages: list[PagesByForm] = []
        for group in self.rows.groups:
            oldest = 0 if group.window is None else max(0, found.length - group.window + 1)
            tables = [record.parts[group.number].table for record in found.records]
            held = join_tables(group.pages, tables, oldest, found.length)
            pages.append(([], []) if held is None else group.by_form(held.numbers))
        return pages

    def known(self, sequence: TokenSequence) -> int:
        """How many tokens a sequence would take over if it were admitted now. Leaves no trace."""
        return self._peek(sequence).length if self._uses(sequence.request) else 0

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        """The same, and what it would have read from disk before."""
        if not self._uses(sequence.request):
            return 0
        owner = self.owner(sequence.request)
        self._tier.plant(owner, sequence.keys)
        return self.index.reach(owner, sequence.keys, sequence.most_reusable).length

    def keys_changed(self, sequence: TokenSequence) -> None:
        """A waiting sequence has other keys than before: have read what it needs now."""
        if self._uses(sequence.request):
            self._tier.restart_reads(sequence)

    def _peek(self, sequence: TokenSequence) -> PrefixMatch:
        return self.index.peek(self.owner(sequence.request), sequence.keys, sequence.most_reusable)

    # Running

    def restore(self, sequence: TokenSequence) -> None:
        """Fill the row of a sequence that was just given one."""
        found = self._found.pop(sequence, None)
        if found is not None:
            assert sequence.row is not None
            restore_row(self.rows, sequence.row, self._with_pages(sequence, found), found.length)
            sequence.row.position = sequence.position(found.length)

    def needs_new_pages(self, sequence: TokenSequence) -> bool:
        """Whether restoring a sequence that was just admitted takes new pages."""
        found = self._found.get(sequence)
        return found is not None and not all(record.has_pages for record in found.records)

    def _with_pages(self, sequence: TokenSequence, found: PrefixMatch) -> Many[Record]:
        """What is only there encoded gets pages again, which the next ones share."""
        if self._compressor is None:
            return found.records
        restored = self._compressor.restored(found.records, found.length)
        same = {id(record): made for record, made in zip(found.records, restored, strict=True) if record is not made}
        for node in self.index.along(self.owner(sequence.request), sequence.keys[: found.length]):
            made = same.get(id(node.record))
            if made is not None and made.end == node.end:
                self.index.fill(node, made)
        return restored

    def keep(self, sequence: TokenSequence, *, last: bool = False) -> None:
        """Keep what the sequence computed since the last time, if this is a place to do so."""
        row = sequence.row
        if row is None or not self._uses(sequence.request):
            return
        computed = row.length
        if not last and not self._is_place(sequence, computed):
            return
        if computed <= sequence.kept:
            return
        if sequence.sight is not None and sequence.sight.inside(computed) is not None:
            return  # who went on from the middle of a medium would have to look at it again
        # At the prompt's end, what was kept just before it does as well where that takes a checkpoint.
        if self.needs.anywhere or not computed == len(sequence.prompt) < sequence.kept + CLOSE_TOKENS:
            self._insert(row, sequence)
        if sequence.request.pin and computed >= len(sequence.prompt):
            self._pin(sequence)

    def _insert(self, row: Row, sequence: TokenSequence) -> None:
        computed = row.length
        codec = self.rows.codec_of(row) if sequence.codec == RAW else sequence.codec
        made = self.index.insert(
            self.owner(sequence.request),
            sequence.keyed(sequence.stored),
            computed,
            lambda begin, back: replace(take_record(self.rows, row, begin, back), codec=codec),
            landmark=computed in sorted(sequence.marks)[:LANDMARK_MESSAGES],
        )
        sequence.kept = computed
        if made is not None:
            self.make_room_for_running(self._needed)

    def _is_place(self, sequence: TokenSequence, computed: int) -> bool:
        return computed in sequence.marks | sequence.stops or computed - sequence.kept >= self._stride

    def _pin(self, sequence: TokenSequence) -> None:
        """Pins must leave room for others: those that would take more than their share are kept like anything else."""
        owner, prompt = self.owner(sequence.request), sequence.keyed(sequence.prompt)
        wanted = self.index.unpinned_bytes(owner, prompt)
        if self.index.pinned_bytes() + wanted <= PINNED_SHARE * self.limit:
            self.index.pin(owner, prompt)

    def adopt(self, owner: CacheOwner, tokens: Many[int], record: UnpagedRecord, *, landmark: bool) -> int:
        """Keep a record that was made elsewhere, of the last of `tokens`; returns the tokens that were new."""
        known = self.index.resident(owner, tokens)
        if self.limit == 0 or not record.begin <= known < record.end:
            return 0  # it is here already, or what it builds on had to go

        def make(begin: int, back: int) -> Record:
            return self.encoding.taken(self.index.records(owner, tokens[:begin]), record.behind(begin))

        self.index.insert(owner, tokens, record.end, make, landmark=landmark)
        self.make_room_for_running(self._needed)
        return record.end - known

    def forget(self, tenant: str) -> int:
        """Let go of all that is kept of a tenant's in memory; returns the bytes. Others that have parts of it on disk
        are told to remove them."""
        self._tier.forget(tenant_digest(tenant))
        return self.index.clear(tenant)

    def make_room_for_running(self, needed: int) -> None:
        """Hold no more than running sequences leave, which need so many bytes."""
        self._needed = needed
        kept = self._tier.reserved
        if self._compressor is not None:
            self._compressor.begin()
        self.index.shrink(self.limit - kept, self._is_enough)

    def _make_room(self) -> bool:
        """See that there is memory for what is about to be read. Whether there is."""
        self.make_room_for_running(self._needed)
        return self._is_enough()

    def _is_enough(self) -> bool:
        """Whether both running sequences and what is being read have memory."""
        kept = self._tier.reserved
        return self._held + kept <= self.limit and self._needed + self._alone + kept <= self._budget.states

    def pause(self) -> None:
        """Nothing can be computed now, though somebody waits."""
        self._tier.pause()

    def rest(self) -> None:
        """Nothing runs."""
        self._tier.rest()

    def free(self) -> None:
        """Let go of all that is kept, at once and unsaved, and of what is being read. The last call."""
        self._found.clear()
        self._tier.free()
        self.index.free()

    def close(self) -> None:
        """Save what is kept, where there is a disk for it."""
        self._tier.close()

    @property
    def _alone(self) -> int:
        """What kept records hold and running sequences do not."""
        return self._held - sum(group.shared_bytes for group in self.rows.groups)

    @property
    def _held(self) -> int:
        """What kept records hold."""
        return self.index.nbytes + sum(group.uncharged_bytes for group in self.rows.groups)

    def check(self) -> None:
        self.index.check()
        assert not self._found, "a prefix was found for a sequence that never ran"


def _common_tokens(sequence: TokenSequence, other: TokenSequence) -> int:
    """How many tokens they have in common. They are compared once: a waiting sequence asks before every step."""
    lengths = len(sequence.tokens), len(other.tokens)
    held = sequence.agreed.get(other.ticket)
    if held is None or held[:2] != lengths:
        held = sequence.agreed[other.ticket] = (*lengths, common_prefix_length(sequence.keys, other.keys))
    return held[2]


def _snippet_tokens(tokens: Many[int]) -> tuple[int, ...]:
    """Those before the first medium and before the first gap: what stands there is no token."""
    return tuple(takewhile(lambda token: 0 <= token < GAP_KEY, tokens))


class RunOnEngineThread(Protocol):
    def __call__(self, work: Callable[[PrefixCache], T]) -> T:
        """Run `work` on the engine thread, between two steps, and wait for what it gives or raises."""
        ...


COMPRESSION_SHARE: Final = 0.02
"""Of the time, what encoding may take. What would take longer has to go instead."""
COMPRESSION_SLICE_S: Final = 0.01
"""What it may take at once, if it took nothing before; the record that is begun within is finished."""
FIRST_DECODING_SPEED: Final = 1e9
"""Bytes of pages a second at which records are expected to be decoded, before any was."""


class RecordCompressor:
    """What the prefix index makes records smaller with. Those of owners who want exact states stay as they are."""

    def __init__(self, encoding: LossyEncoding, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoding, self._clock = encoding, clock
        self._left, self._since = COMPRESSION_SLICE_S, clock()
        self._speed = FIRST_DECODING_SPEED

    def begin(self) -> None:
        """Room is being made from now on, between two steps."""
        now = self._clock()
        self._left = min(COMPRESSION_SLICE_S, self._left + COMPRESSION_SHARE * (now - self._since))
        self._since = now

    def may(self, node: PrefixNode) -> bool:
        record = node.record
        return record is not None and any(part.table.numbers for part in record.parts) and not node.root_owner.exact

    def least(self, node: PrefixNode) -> int:
        record = _record_of(node)
        return record.nbytes if node.root_owner.exact else self._encoding.least(record)

    def saves(self, node: PrefixNode) -> int:
        record = _record_of(node)
        if record.encoded is None and self._left <= 0:
            return 0
        return self._encoding.saves(record)

    def compress_record(self, node: PrefixNode) -> Record:
        began = self._clock()
        record = self._encoding.shrunk(_record_of(node))
        self._left -= self._clock() - began
        return record

    def seconds(self, node: PrefixNode) -> float:
        return sum(part.nbytes for part in _record_of(node).parts) / self._speed

    def restored(self, records: Sequence[Record], length: int) -> list[Record]:
        """The same with pages, as far as a sequence of so many tokens needs them."""
        if all(record.has_pages for record in records):
            return list(records)
        began = self._clock()
        made = self._encoding.with_pages(records, length)
        new = sum(part.nbytes for record in made for part in record.parts)
        new -= sum(part.nbytes for record in records for part in record.parts)
        self._speed += 0.2 * (max(1, new) / max(self._clock() - began, 1e-6) - self._speed)
        return made


def _record_of(node: PrefixNode) -> Record:
    assert node.record is not None
    return node.record

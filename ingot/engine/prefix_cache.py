"""The prefix cache in the step loop: KV that was computed before is reused.

An admitted sequence starts after its longest cached prefix. What it computes is cached as it goes: at the ends of
messages, where prompts diverge, at strides, and at its own end. Cached records give way to running sequences at once:
they are compressed where a codec is set (`RecordCompressor`), offloaded to disk where there is one (`offload`), or
evicted. Compression runs on the engine thread between steps, for a small share of the time. For the engine thread
alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from ingot.cache.prefix_index import NO_COMPRESSOR, SNIPPET_TOKENS, CacheTier, PrefixIndex, PrefixMatch, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner, PrefixNode, common_prefix_length
from ingot.cache.record_encoding import LossyEncoding, RecordEncoding
from ingot.cache.records import Record, RecordForm, UnpagedRecord, restore_row, take_record
from ingot.engine.memory_budget import MemoryBudget, PagesByForm
from ingot.engine.offload import DiskTier, OffloadTier
from ingot.engine.request import CacheReason, CacheReport, Request
from ingot.engine.sequence import GAP_KEY, TokenSequence
from ingot.engine.step_costs import StepCosts

T = TypeVar("T")
CACHE_STRIDE = 512
"""Tokens of a prompt after which its KV is cached, so that a cancelled or shared prompt is not lost."""
CHECKPOINT_STRIDE = 2048
"""The same where a sequence can only resume at checkpoints, which are expensive and mostly at message ends."""
LANDMARK_MESSAGES = 2
"""Message ends that other conversations are likely to share: after the system prompt and the first message."""
PINNED_SHARE = 0.5
"""Of the memory for cached prefixes, the most that pinned ones may take."""
WORTH_WAITING_TOKENS = 64
"""A sequence waits for another's prefill when they share at least this many tokens that are still to be computed."""
MOST_STOPS = 8
"""Lengths besides its message ends at which a prompt stops for others."""


def resume_needs(rows: BatchState) -> ResumeNeeds:
    windows = tuple((group.number, group.window) for group in rows.groups if group.window is not None)
    return ResumeNeeds("recurrent" in rows.kinds, windows)


@dataclass
class PrefixCacheCounts:
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
        self._tier = OffloadTier()
        self.encoding = RecordEncoding(rows) if encoding is None else encoding
        self._compressor = RecordCompressor(self.encoding) if isinstance(self.encoding, LossyEncoding) else None
        self.index = PrefixIndex(
            needs,
            self._seconds,
            offload=lambda node: self._tier.offload(node),
            compressor=self._compressor or NO_COMPRESSOR,
        )
        self.limit = limit
        self.counts: defaultdict[str, PrefixCacheCounts] = defaultdict(PrefixCacheCounts)  # by tenant
        self.rows, self.needs, self._budget = rows, needs, budget
        rows.when_encoded = self.index.recount
        self._stride = CACHE_STRIDE if needs.anywhere else CHECKPOINT_STRIDE
        self._matches: dict[TokenSequence, PrefixMatch] = {}
        self._running_bytes = 0  # that running sequences need

    def _seconds(self, tokens: int) -> float:
        """What computing so many tokens takes; 0 where that is not known yet."""
        return self._costs.prompt_ms(tokens) / 1000

    def _sure_seconds(self, tokens: int) -> float:
        """The same; 0 where that is not sure."""
        return self._costs.sure_prompt_ms(tokens) / 1000

    def attach(self, disk: DiskBackend, form: RecordForm) -> None:
        """Offload to disk what memory has no room for. `form` is that of raw records."""
        if self.limit:
            self._tier = DiskTier(
                disk, self.index, self.rows, self.encoding, form, self._sure_seconds, self._make_room, self.owner
            )

    # Planning

    def expect(self, waiting: Sequence[TokenSequence]) -> None:
        """Start to onload the prefixes of waiting sequences."""
        self._tier.expect(waiting, lambda sequence: self._uses(sequence.request))

    def admit(self, sequence: TokenSequence) -> None:
        """Let an admitted sequence start after its longest cached prefix."""
        first = sequence.preemptions == 0
        if first:
            report = self.explain(sequence.request, sequence.keys, "ram")
            # In tokens of the prompt as it was sent, also where SpecPrefill left some out.
            known = sequence.position(report.known) if sequence.thinned else report.known
            whole = len(sequence.whole_prompt) + sequence.produced
            sequence.report = replace(report, prompt_tokens=whole, known=known)
        if not self._uses(sequence.request):
            return
        owner = self.owner(sequence.request)
        match = self.index.match(owner, sequence.keys, sequence.most_reusable)
        read = self._tier.settle(sequence, match.length)
        if match.length:
            self._matches[sequence] = match
        sequence.computed = sequence.kept = match.length
        sequence.codec = match.codec
        sequence.common_prefixes.clear()
        if first:
            sequence.stops = self._stops(sequence, match)
            sequence.cached = match.length
            sequence.report = sequence.report and replace(sequence.report, read=read, codec=match.codec)
            self.counts[owner.tenant].add(len(sequence.tokens), match.length)

    def _stops(self, sequence: TokenSequence, match: PrefixMatch) -> frozenset[int]:
        """Where a prompt should stop besides its message ends: where it diverges from what is cached, as others will
        diverge there too, and one token before its end, from where the same prompt can resume."""
        if self.needs.anywhere:
            return frozenset()
        last = len(sequence.tokens) - 1
        lengths = sequence.marks | {match.length}
        for stop in (min(match.known, last), last):
            if not any(stop - CLOSE_TOKENS < length <= stop for length in lengths):
                lengths |= {stop}
        return lengths - sequence.marks - {match.length}

    def explain(self, request: Request, tokens: Sequence[int], tier: CacheTier = "disk") -> CacheReport:
        """What a prompt with these keys would reuse now, from memory alone or from disk as well, and why no more."""
        if (reason := self._skip_reason(request)) is not None:
            return CacheReport(len(tokens), 0, 0, reason)
        owner = self.owner(request)
        self._tier.add_disk_entry(owner, tokens)
        match = self.index.explain(owner, tokens, len(tokens) - 1, tier)
        ours = _snippet_tokens(tokens[match.known : match.known + SNIPPET_TOKENS])
        theirs = _snippet_tokens(match.theirs)
        codec = self.encoding.name if match.disk_record else match.codec
        return CacheReport(len(tokens), match.length, match.known, match.reason, ours, theirs, match.disk_record, codec)

    def _skip_reason(self, request: Request) -> CacheReason | None:
        """Why a request does not use the cache, if so."""
        if self.limit == 0:
            return "disabled"
        if not request.cache:
            return "off"
        # A prompt that is scored is computed whole: its logprobs are not part of any record.
        return "scored" if request.sampling.prompt_logprobs is not None else None

    def owner(self, request: Request) -> CacheOwner:
        """The owner of a request's prefixes. Requests for exact KV have their own, where others' goes through a
        codec."""
        exact = request.exact and (self.encoding.lossy or self.rows.codec is not None)
        return CacheOwner(request.tenant, request.salt, exact, request.lora_digest)

    def _uses(self, request: Request) -> bool:
        return self._skip_reason(request) is None

    def waits(self, sequence: TokenSequence, running: Iterable[TokenSequence]) -> bool:
        """Whether its prefix is being computed by a running sequence, or read from disk."""
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
        """The last length up to `shared` at which a running sequence stops. Where that is much shorter, the sequence is
        made to stop at `shared`, instead of slightly after it."""
        last = max((length for length in other.marks | other.stops if length <= shared), default=0)
        if shared - max(last, other.computed) < WORTH_WAITING_TOKENS:
            return last
        stops = {stop for stop in other.stops if not shared < stop < shared + WORTH_WAITING_TOKENS} | {shared}
        if len(stops) > MOST_STOPS:
            return last
        other.stops = frozenset(stops)
        return shared

    def next_stop(self, sequence: TokenSequence) -> int:
        """The length at which its next chunk must end at the latest, so that a checkpoint can be taken."""
        if self.needs.anywhere or not self._uses(sequence.request):
            return sequence.total
        ahead = (length for length in sequence.marks | sequence.stops if length > sequence.computed)
        return min(ahead, default=sequence.total)

    def reusable_pages(self, sequence: TokenSequence) -> list[PagesByForm]:
        """By group, the cached pages that a sequence would reuse if it were admitted now. Changes nothing."""
        if not self._uses(sequence.request):
            return []
        match = self._peek(sequence)
        pages: list[PagesByForm] = []
        for group in self.rows.groups:
            oldest = 0 if group.window is None else max(0, match.length - group.window + 1)
            tables = [record.parts[group.number].table for record in match.records]
            table = join_tables(group.pages, tables, oldest, match.length)
            pages.append(([], []) if table is None else group.by_form(table.numbers))
        return pages

    def known(self, sequence: TokenSequence) -> int:
        """How many tokens a sequence would reuse if it were admitted now. Changes nothing."""
        return self._peek(sequence).length if self._uses(sequence.request) else 0

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        """The same, including what it would have read from disk before."""
        if not self._uses(sequence.request):
            return 0
        owner = self.owner(sequence.request)
        self._tier.add_disk_entry(owner, sequence.keys)
        return self.index.reach(owner, sequence.keys, sequence.most_reusable).length

    def keys_changed(self, sequence: TokenSequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now."""
        if self._uses(sequence.request):
            self._tier.restart_reads(sequence)

    def _peek(self, sequence: TokenSequence) -> PrefixMatch:
        return self.index.peek(self.owner(sequence.request), sequence.keys, sequence.most_reusable)

    # Running

    def restore(self, sequence: TokenSequence) -> None:
        """Fill the new row of a sequence with its cached prefix."""
        match = self._matches.pop(sequence, None)
        if match is not None:
            row = sequence.live_row
            restore_row(self.rows, row, self._with_pages(sequence, match), match.length)
            row.position = sequence.position(match.length)

    def needs_new_pages(self, sequence: TokenSequence) -> bool:
        """Whether restoring a sequence that was just admitted takes new pages."""
        match = self._matches.get(sequence)
        return match is not None and not all(record.has_pages for record in match.records)

    def _with_pages(self, sequence: TokenSequence, match: PrefixMatch) -> Sequence[Record]:
        """Records without pages are decoded into pages, which later sequences share."""
        if self._compressor is None:
            return match.records
        restored = self._compressor.restored(match.records, match.length)
        same = {id(record): made for record, made in zip(match.records, restored, strict=True) if record is not made}
        for node in self.index.along(self.owner(sequence.request), sequence.keys[: match.length]):
            made = same.get(id(node.record))
            if made is not None and made.end == node.end:
                self.index.fill(node, made)
        return restored

    def keep(self, sequence: TokenSequence, *, last: bool = False) -> None:
        """Cache what the sequence computed since the last time, if this is a length to do so; always if `last`."""
        row = sequence.row
        if row is None or not self._uses(sequence.request):
            return
        computed = row.length
        if computed <= sequence.kept or not (last or self._is_cache_point(sequence, computed)):
            return
        if sequence.prompt_media is not None and sequence.prompt_media.inside(computed) is not None:
            return  # to resume inside an image would mean to encode it again
        # At the prompt's end, a checkpoint just before it is as good.
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
            self.make_room_for_running(self._running_bytes)

    def _is_cache_point(self, sequence: TokenSequence, computed: int) -> bool:
        return computed in sequence.marks | sequence.stops or computed - sequence.kept >= self._stride

    def _pin(self, sequence: TokenSequence) -> None:
        """Pins must leave room for others: beyond their share, prefixes are cached unpinned."""
        owner, prompt = self.owner(sequence.request), sequence.keyed(sequence.prompt)
        wanted = self.index.unpinned_bytes(owner, prompt)
        if self.index.pinned_bytes() + wanted <= PINNED_SHARE * self.limit:
            self.index.pin(owner, prompt)

    def adopt(self, owner: CacheOwner, tokens: Sequence[int], record: UnpagedRecord, *, landmark: bool) -> int:
        """Cache a record that was made elsewhere, of the last of `tokens`; returns the tokens that were new."""
        resident = self.index.resident(owner, tokens)
        if self.limit == 0 or not record.begin <= resident < record.end:
            return 0  # it is cached already, or its parent was evicted

        def make(begin: int, back: int) -> Record:
            return self.encoding.taken(self.index.records(owner, tokens[:begin]), record.behind(begin))

        self.index.insert(owner, tokens, record.end, make, landmark=landmark)
        self.make_room_for_running(self._running_bytes)
        return record.end - resident

    def forget(self, tenant: str) -> int:
        """Drop a tenant's prefixes from memory, and from other ranks' disks; returns the bytes."""
        self._tier.forget(tenant_digest(tenant))
        return self.index.clear(tenant)

    def make_room_for_running(self, needed: int) -> None:
        """Shrink the cache to what running sequences leave, which need so many bytes."""
        self._running_bytes = needed
        reserved = self._tier.reserved
        if self._compressor is not None:
            self._compressor.begin()
        self.index.shrink(self.limit - reserved, self._is_enough)

    def _make_room(self) -> bool:
        """Try to free memory for what is about to be read."""
        self.make_room_for_running(self._running_bytes)
        return self._is_enough()

    def _is_enough(self) -> bool:
        """Whether both running sequences and what is being read have memory."""
        reserved = self._tier.reserved
        cached, unshared = self._cached_bytes()
        return cached + reserved <= self.limit and self._running_bytes + unshared + reserved <= self._budget.states

    def _cached_bytes(self) -> tuple[int, int]:
        """What cached records take, and what of that they do not share with running sequences."""
        cached = self.index.nbytes + sum(group.uncharged_bytes for group in self.rows.groups)
        return cached, cached - sum(group.shared_bytes for group in self.rows.groups)

    def pause(self) -> None:
        """Nothing can be computed now, though sequences wait."""
        self._tier.pause()

    def rest(self) -> None:
        """Nothing runs."""
        self._tier.rest()

    def free(self) -> None:
        """Drop all cached prefixes, unsaved, and cancel reads. The last call."""
        self._matches.clear()
        self._tier.free()
        self.index.free()

    def close(self) -> None:
        """Save cached prefixes, where there is a disk."""
        self._tier.close()

    def check(self) -> None:
        self.index.check()
        assert not self._matches, "a prefix was found for a sequence that never ran"


def _common_tokens(sequence: TokenSequence, other: TokenSequence) -> int:
    """How many tokens they have in common; remembered, as a waiting sequence asks before every step."""
    lengths = len(sequence.tokens), len(other.tokens)
    compared = sequence.common_prefixes.get(other.ticket)
    if compared is None or compared[:2] != lengths:
        compared = sequence.common_prefixes[other.ticket] = (
            *lengths,
            common_prefix_length(sequence.keys, other.keys),
        )
    return compared[2]


def _snippet_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens before the first image and before the first gap: the keys there are no tokens."""
    return tuple(takewhile(lambda token: 0 <= token < GAP_KEY, tokens))


class RunOnEngineThread(Protocol):
    def __call__(self, work: Callable[[PrefixCache], T]) -> T:
        """Run `work` on the engine thread, between two steps, and return or raise what it does."""


COMPRESSION_SHARE: Final = 0.02
"""Of the time, that compression may take. What would take longer is evicted instead."""
COMPRESSION_SLICE_S: Final = 0.01
"""That it may take at once, if it took none before; a record that was begun is finished."""
FIRST_DECODING_SPEED: Final = 1e9
"""Assumed bytes of pages a second, before any record was decoded."""


class RecordCompressor:
    """Compresses records for the prefix index, except those of owners of exact KV."""

    def __init__(self, encoding: LossyEncoding, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoding, self._clock = encoding, clock
        self._left, self._since = COMPRESSION_SLICE_S, clock()
        self._speed = FIRST_DECODING_SPEED

    def begin(self) -> None:
        """The prefix index is about to shrink, between two steps."""
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
        """The records with pages, as far as a sequence of so many tokens needs them."""
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

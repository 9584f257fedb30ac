"""Who waits for whose prompt, and what it costs to know."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import RAW, CodecName
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec, RecordCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.store import INDEX_ROOM, DiskLimits, RecordStore
from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.layer_state import LayerState, RecurrentState
from ingot.cache.prefix_eviction import is_removable
from ingot.cache.prefix_index import ResumeNeeds
from ingot.cache.records import Record, take_record, unpage_record
from ingot.engine.memory_budget import KVReservations, MemoryBudget
from ingot.engine.prefix_cache import WORTH_WAITING_TOKENS, PrefixCache, resume_needs
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.engine.step_costs import StepCosts
from ingot.kernels.cpu import native
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import record_form_of
from tests import tiny

SHAPE = Footprint(groups=((None, 1),), recurrent=0, activation=0, score=0, logits=0)


class Token(int):
    """Counts how often any is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def prefix_cache(needs: ResumeNeeds) -> PrefixCache:
    budget = MemoryBudget(1 << 20, 0, SHAPE, context=1 << 14, widest=512, rows=4)
    states: list[LayerState] = [AppendState(), *([RecurrentState(1)] if needs.checkpoint else ())]
    made = PrefixCache(BatchState(states), budget, StepCosts(), limit=1 << 20)
    assert resume_needs(made.rows) == needs
    return made


def sequence(ticket: int, tokens: list[int], marks: tuple[int, ...] = ()) -> TokenSequence:
    own = tuple(Token(token) for token in tokens)
    made = TokenSequence(Request(f"r{ticket}", (own,)), 0, ticket, own, limit=4, seed=0)
    made.marks = frozenset(marks)
    return made


@pytest.mark.parametrize("needs", [ResumeNeeds(), ResumeNeeds(checkpoint=True)])
def test_prompts_are_compared_once_however_long_they_wait(needs: ResumeNeeds) -> None:
    kept = prefix_cache(needs)
    shared = list(range(2000))
    running = sequence(0, [*shared, 1])
    waiting = [sequence(number, [*shared[: 2000 - number], 90_000 + number]) for number in range(1, 20)]
    Token.compared = 0
    assert all(kept.waits(each, [running]) for each in waiting)
    assert Token.compared <= 3 * 2000 * len(waiting)
    Token.compared = 0
    for _ in range(100):
        running.computed = running.kept = running.kept + 10
        assert all(kept.waits(each, [running]) for each in waiting)
    assert Token.compared == 0


def test_a_prompt_that_has_grown_is_compared_again() -> None:
    kept = prefix_cache(ResumeNeeds())
    running, waiting = sequence(0, [*range(100), 7, 8]), sequence(1, [*range(100), 7, 8, 9])
    running.kept = 103 - WORTH_WAITING_TOKENS
    assert not kept.waits(waiting, [running])
    running.tokens += [9, 9]
    waiting.tokens += [9, 9]
    assert kept.waits(waiting, [running])


def test_a_model_that_needs_checkpoints_is_asked_to_stop_where_a_waiting_prompt_parts() -> None:
    kept = prefix_cache(ResumeNeeds(checkpoint=True))
    running, waiting = sequence(0, list(range(500)), marks=(100,)), sequence(1, [*range(300), 7])
    assert kept.next_stop(running) == 100
    assert kept.waits(waiting, [running])
    running.computed = running.kept = 100
    assert kept.next_stop(running) == 300
    assert kept.waits(waiting, [running])
    running.computed = running.kept = 300
    assert not kept.waits(waiting, [running])


def test_a_prompt_stops_for_a_few_others_at_most() -> None:
    kept = prefix_cache(ResumeNeeds(checkpoint=True))
    running = sequence(0, list(range(5000)))
    for number in range(1, 40):
        kept.waits(sequence(number, [*range(100 * number), 90_000]), [running])
    assert len(running.stops) == 8


def test_another_tenants_prompt_is_not_waited_for() -> None:
    kept = prefix_cache(ResumeNeeds())
    own = tuple(range(200))
    theirs = TokenSequence(Request("theirs", (own,), tenant="ann"), 0, 0, own, limit=4, seed=0)
    assert not kept.waits(sequence(1, list(own)), [theirs])


KINDS = ["llama", "window", "hybrid"]
WIDEST = 512
SECRET = b"ours"
FAILING = ["shrunk", "loose", "taken", "with_pages", "opened", "offer", "ask", "provide", "copy", "lay", "checkpoint"]
"""What the engine calls that may fail: encoding and decoding, the disk's threads, memory for states."""


class Who(NamedTuple):
    tenant: str
    exact: bool
    pins: bool
    marks: bool


NUMBERS, BRANCHES = st.integers(0, 1), st.integers(2, 4)
LENGTHS = st.sampled_from([5, 40, 63, 64, 65, 100, 128, 150, 200])
TAILS = st.sampled_from([1, 3, 30, 64, 80])
COUNTS = st.sampled_from([1, 20, 64, 100, 130])
WHO = st.builds(Who, st.sampled_from(["a", "b"]), *[st.booleans()] * 3)
FATES = st.sampled_from(["waits", "runs", "ends", "ends"])
EVENTS = st.sampled_from(
    [
        "time passes",
        "nothing runs",
        "the queue is looked at",
        "a call is to fail",
        "a call is to fail",
        "a file is lost",
        "all of one tenant's is cleared",
        "the server starts again",
    ]
)


class Fault(Exception):
    """A device that has no memory left, say."""


class Clock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@cache
def adapter_of(kind: str) -> ModelAdapter:
    made: ModelAdapter = tiny.adapter(kind, WIDEST, exact=True)
    return made


@cache
def document(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(tiny.VOCAB - 1) for _ in range(300))


ANSWER = document(9)[:8]


@lru_cache(maxsize=1024)
def computed_anew(kind: str, tokens: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    """The states of a row that computed all of these tokens itself."""
    adapter = adapter_of(kind)
    rows = adapter.new_batch_state()
    row = rows.new()
    run(adapter, rows, row, tokens)
    return states(rows, row)


def run(adapter: ModelAdapter, rows: BatchState, row: Any, tokens: tuple[int, ...]) -> None:
    logits = adapter.run(rows, mx.array(tokens, mx.uint32), [ForwardPart((row,), len(tokens))], [len(tokens) - 1])
    mx.eval(logits, rows.pending())


def states(rows: BatchState, row: Any) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for array in unpage_record(rows, take_record(rows, row, 0)).arrays()]


class KeptStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        native.use_one_path()
        self.folder = Path(tempfile.mkdtemp(prefix="ingot-"))
        self.disk: DiskBackend | None = None
        self.clock = Clock()
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.asked: list[tuple[tuple[int, ...], Who]] = []
        self.failing: tuple[str, int] | None = None

    @initialize(
        kind=st.sampled_from(KINDS),
        coded=st.sampled_from([True, True, True, False]),
        decoding=st.sampled_from([1.0, 1.0, 1e9]),
        on_disk=st.booleans(),
        pages=st.integers(2, 14),
        files=st.sampled_from([60_000, 1 << 26]),
    )
    def open(self, kind: str, coded: bool, decoding: float, on_disk: bool, pages: int, files: int) -> None:
        """`decoding` are bytes a second: it may take as long as computing does."""
        self.decoding = decoding
        self.kind, self.adapter = kind, adapter_of(kind)
        self.codec: PairCodec = RecordCodec(CodecName.parse("affine8")) if coded else RAW_CODEC
        self.pages = pages
        if on_disk:
            self.disk = DiskBackend.of(
                RecordStore(self.folder, {"model": kind}, DiskLimits(INDEX_ROOM + files, sync=False), SECRET)
            )
        self.begin()
        self.converse(0, 4, 30, Who("a", exact=False, pins=False, marks=True))

    def reset_after_fault(self) -> None:
        """As an engine does whose step failed."""
        for sequence in list(self.running):
            self.leave(sequence)
        self.waiting.clear()
        self.begin()

    def begin(self) -> None:
        self.rows = self.adapter.new_batch_state()
        form = record_form_of(self.adapter, self.rows)
        page = sum(group.page_bytes for group in self.rows.groups) + self.rows.slot_bytes
        costs = StepCosts()
        costs.observe_prefill(100, 100_000.0)  # so much that reading is always quicker
        total = self.adapter.weight_bytes + 60 * page
        budget = MemoryBudget(
            total, self.adapter.weight_bytes, self.adapter.footprint, context=512, widest=WIDEST, rows=4
        )
        self.budget = budget
        self.prefix_cache = PrefixCache(
            self.rows, budget, costs, self.pages * page, self.adapter.encoding(self.rows, self.codec, form)
        )
        if self.disk is not None:
            self.prefix_cache.attach(self.disk, form)
            self.keep_time(self.prefix_cache._tier._offloader)  # type: ignore[attr-defined]
        if self.prefix_cache._compressor is not None:
            self.keep_time(self.prefix_cache._compressor)
            self.prefix_cache._compressor._speed = self.decoding
        self.room = KVReservations(budget, self.prefix_cache.reusable_pages)
        self.let_fail()

    def keep_time(self, whoever: Any) -> None:
        whoever._clock, whoever._since = self.clock, self.clock.now

    def let_fail(self) -> None:
        holders: list[Any] = [self.prefix_cache.encoding, self.rows]
        if self.disk is not None:
            holders += [self.disk.writer, self.disk.reader]
        for name in FAILING:
            for holder in holders:
                if (call := getattr(type(holder), name, None)) is not None:
                    call = partial(call, holder)
                    setattr(holder, name, self.failing_at_will(name, call))

    def failing_at_will(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: Any) -> Any:
            if self.failing is not None and self.failing[0] == name:
                left, self.failing = self.failing[1], None
                if left:
                    self.failing = name, left - 1
                else:
                    raise Fault(name)
            return call(*given)

        return guarded

    def teardown(self) -> None:
        self.failing = None
        if hasattr(self, "prefix_cache"):
            for sequence in list(self.running):
                self.leave(sequence)
            self.prefix_cache.close()
            self.check_pages()
            for tenant in ("a", "b"):
                self.prefix_cache.forget(tenant)
            assert self.prefix_cache.index.nbytes == 0 and not any(group.pages.kept for group in self.rows.groups)
        shutil.rmtree(self.folder, ignore_errors=True)
        native.use_one_path(False)

    # Sequences, as the scheduler and the runner treat them

    @rule(number=NUMBERS, length=LENGTHS, branch=BRANCHES, tail=TAILS, who=WHO, fate=FATES)
    def ask(self, number: int, length: int, branch: int, tail: int, who: Who, fate: str) -> None:
        """Something that begins like others do."""
        self.live(document(number)[:length] + document(branch)[:tail], length, who, fate)

    @rule(place=st.integers(0, 99), cut=LENGTHS, branch=BRANCHES, tail=TAILS, fate=FATES)
    def ask_again(self, place: int, cut: int, branch: int, tail: int, fate: str) -> None:
        """What somebody asked before, or its beginning, and something else behind it."""
        if self.asked:
            prompt, who = self.asked[place % len(self.asked)]
            self.live(prompt[:cut] + document(branch)[:tail], len(prompt[:cut]), who, fate)

    @rule(number=NUMBERS, turns=st.integers(2, 4), tail=TAILS, who=WHO)
    def talk(self, number: int, turns: int, tail: int, who: Who) -> None:
        self.converse(number, turns, tail, who)

    def converse(self, number: int, turns: int, tail: int, who: Who) -> None:
        """Each turn goes on from the answer to the one before."""
        prompt: tuple[int, ...] = document(number)[:20]
        for turn in range(turns):
            length, prompt = len(prompt), prompt + document(turn)[:tail]
            self.live(prompt, length, who, "ends")
            prompt += ANSWER

    def live(self, prompt: tuple[int, ...], mark: int, who: Who, fate: str) -> None:
        request = Request("r", (prompt,), tenant=who.tenant, exact=who.exact, pin=who.pins)
        sequence = TokenSequence(request, 0, len(self.asked), prompt, 64, seed=0)
        sequence.marks = frozenset({mark} if who.marks else ())
        self.asked.append((prompt, who))
        self.waiting.append(sequence)
        if fate != "waits":
            self.start(sequence)
        if fate == "ends":
            self.finish(sequence)

    def start(self, sequence: TokenSequence) -> None:
        """A waiting sequence is admitted, once what it waits for is read, and given a row."""
        sequence.reserved = len(sequence.tokens) + 64
        coming = [(each, each.reserved) for each in (*self.running, sequence)]
        with self.faults(sequence):
            self.prefix_cache.expect(self.waiting)
            while self.prefix_cache.waits(sequence, ()):
                self.prefix_cache.pause()
                self.prefix_cache.expect(self.waiting)
            if not self.room.fits(coming):
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.prefix_cache.admit(sequence)
            if self.prefix_cache.needs_new_pages(sequence):
                self.prefix_cache.make_room_for_running(self.room.needed(coming))
            sequence.row = self.rows.new(exact=sequence.request.exact)
            self.prefix_cache.restore(sequence)
            assert sequence.row.length == sequence.computed
            if sequence.computed:
                self.compare(sequence)
            self.make_room_for_running()

    def compare(self, sequence: TokenSequence) -> None:
        """What was taken over is what computing would give, but for what the codec leaves out."""
        tokens = tuple(sequence.tokens[: sequence.computed])
        lossy = self.codec.lossy and not sequence.request.exact
        assert lossy or sequence.codec == RAW
        for mine, anew in zip(states(self.rows, sequence.row), computed_anew(self.kind, tokens), strict=True):
            assert np.mean(np.abs(mine - anew)) < (0.1 * np.std(anew) if lossy else 1e-3)

    def compute(self, sequence: TokenSequence, count: int) -> None:
        """A chunk of a prompt, up to where it has to end."""
        ahead = [place for place in sequence.marks | sequence.stops if place > sequence.computed]
        end = min([sequence.computed + count, len(sequence.tokens), *ahead])
        run(self.adapter, self.rows, sequence.row, tuple(sequence.tokens[sequence.computed : end]))
        sequence.computed = end
        self.prefix_cache.keep(sequence, last=end == len(sequence.prompt))

    def finish(self, sequence: TokenSequence) -> None:
        with self.faults(sequence):
            while sequence in self.running and sequence.computed < len(sequence.tokens):
                self.compute(sequence, WIDEST)
            if sequence in self.running:
                sequence.tokens += ANSWER
                self.compute(sequence, WIDEST)
                self.prefix_cache.keep(sequence, last=True)
                self.leave(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        self.prefix_cache._matches.pop(sequence, None)
        if sequence.row is not None:
            self.rows.leave(sequence.row)
            sequence.row = None
        self.running.remove(sequence)

    @rule(which=st.integers(0, 9), what=st.sampled_from(["step", "step", "end", "end early", "preempt"]), count=COUNTS)
    def go_on(self, which: int, what: str, count: int) -> None:
        """Somebody who waits is admitted, or gives up; somebody who runs computes more, or leaves."""
        everybody = [*self.running, *self.waiting]
        if not everybody:
            return
        sequence = everybody[which % len(everybody)]
        if sequence in self.waiting:
            if what == "end early":
                self.waiting.remove(sequence)
            else:
                self.start(sequence)
        elif what == "preempt":
            self.leave(sequence)
            sequence.computed = sequence.kept = 0
            sequence.preemptions += 1
            self.waiting.append(sequence)
        elif what == "end early":
            with self.faults(sequence):
                self.prefix_cache.keep(sequence, last=True)
                self.leave(sequence)
        elif what == "step" and sequence.computed < len(sequence.tokens):
            with self.faults(sequence):
                self.compute(sequence, count)
        else:
            self.finish(sequence)

    # What happens besides

    @rule(pages=st.sampled_from([10, 30, 40, 60]))
    def be_short_of_memory(self, pages: int) -> None:
        with self.faults():
            self.make_room_for_running(pages * sum(group.page_bytes for group in self.rows.groups))

    def make_room_for_running(self, more: int = 0) -> None:
        needed = self.room.needed([(each, each.reserved) for each in self.running]) + more
        self.prefix_cache.make_room_for_running(needed)
        reserved, index = self.prefix_cache._tier.reserved, self.prefix_cache.index
        assert index.nbytes <= max(0, self.prefix_cache.limit - reserved)
        cached, unshared = self.prefix_cache._cached_bytes()
        if cached + reserved > self.prefix_cache.limit:
            needed = self.budget.states  # as much has to go as can
        if needed + unshared + reserved > self.budget.states:
            idle = [node for node in index.nodes() if is_removable(node) and node.record and node.record.idle_bytes]
            assert not idle, "something could have gone"

    @rule(what=EVENTS, place=st.integers(0, 99))
    def meanwhile(self, what: str, place: int) -> None:
        if what == "time passes":
            self.clock.now += 0.2 * place
        elif what == "a file is lost":
            files = sorted(self.folder.glob("*/*.safetensors"))
            for file in files[place % len(files) :][:1] if files else ():
                file.unlink()
        elif what == "a call is to fail":
            self.failing = FAILING[place % len(FAILING)], place % 4
        elif what == "all of one tenant's is cleared":
            self.prefix_cache.forget("a")
        elif what == "nothing runs" and not self.running:
            with self.faults():
                self.rows.trim()
                self.prefix_cache.rest()
        elif what == "the queue is looked at":
            with self.faults():
                self.prefix_cache.expect(self.waiting)
        elif what == "the server starts again":
            self.failing = None
            self.prefix_cache.close()
            if self.disk is not None:
                self.disk = DiskBackend.of(
                    RecordStore(self.folder, {"model": self.kind}, self.disk.store.limits, SECRET)
                )
            self.reset_after_fault()

    @contextmanager
    def faults(self, sequence: TokenSequence | None = None) -> Iterator[None]:
        """What fails ends the sequence that it was done for; the others go on."""
        try:
            yield
        except Fault as fault:
            if fault.args == ("ask",):  # nobody would ever wait to the end for what was not asked for
                self.reset_after_fault()
            elif sequence in self.waiting:
                self.waiting.remove(sequence)  # type: ignore[arg-type]
            elif sequence in self.running:
                self.leave(sequence)  # type: ignore[arg-type]

    # What always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "prefix_cache"):
            return
        if self.disk is not None:
            assert self.disk.drain(20)
        self.rows.check()
        self.prefix_cache.check()
        for sequence in self.running:
            assert sequence.row is not None and sequence.row.length >= sequence.computed
        self.check_pages()

    def check_pages(self) -> None:
        """Each page is held as often as rows and records say, and paid for once."""
        kept = [node.record for node in self.prefix_cache.index.nodes() if node.record is not None]
        found: dict[int, Record] = {id(record): record for record in kept}
        for match in self.prefix_cache._matches.values():
            found.update((id(record), record) for record in match.records)
        for group in self.rows.groups:
            rows = [each.row.tables[group.number] for each in self.running if each.row is not None]
            records = [record.parts[group.number] for record in found.values()]
            tables = {id(part.table): part.table for part in records}.values()
            by_rows, by_records = (Counter(page for table in some for page in table.numbers) for some in (rows, tables))
            pages = group.pages
            for page in range(pages.made):
                assert (pages._by_rows[page], pages._by_records[page]) == (by_rows[page], by_records[page])
            if len(found) == len(kept):
                # What windows see of earlier tokens may be held by several, of whom the one that paid for it is gone.
                assert group.window is not None or not pages.uncharged
                paid, entries = sum(part.nbytes for part in records), pages.kept * group.page_bytes
                assert paid + group.uncharged_bytes == entries, (paid, entries)


TestKeptStates = KeptStates.TestCase
TestKeptStates.settings = settings(stateful_step_count=25)

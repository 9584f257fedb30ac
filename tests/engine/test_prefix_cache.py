"""Kept prefixes under everything at once: rows that run, branch and end, a codec, a disk, exact requests, pins, memory
that is too small, files that vanish, and calls that fail. Whatever happens, in whatever order, pages are held by those
who say so and by nobody else, bytes are counted once, and who takes something over has what computing would give."""

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
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import Rows
from ingot.cache.codecs.names import RAW, CodecName
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec, RecordCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.store import INDEX_ROOM, DiskLimits, RecordStore
from ingot.cache.forward_batch import Part
from ingot.cache.packing import loosened
from ingot.cache.prefix_eviction import removable
from ingot.cache.records import Record, take
from ingot.engine.memory_budget import Budget
from ingot.engine.prefix_cache import Reuse
from ingot.engine.request import Request
from ingot.engine.room import Room
from ingot.engine.sequence import Sequence
from ingot.engine.step_costs import StepCosts
from ingot.kernels import native
from ingot.models.adapter import Adapter
from ingot.models.form import form_of
from tests import tiny

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
def adapter_of(kind: str) -> Adapter:
    made: Adapter = tiny.adapter(kind, WIDEST, exact=True)
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
    rows = adapter.new_rows()
    row = rows.new()
    run(adapter, rows, row, tokens)
    return states(rows, row)


def run(adapter: Adapter, rows: Rows, row: Any, tokens: tuple[int, ...]) -> None:
    logits = adapter.run(rows, mx.array(tokens, mx.uint32), [Part((row,), len(tokens))], [len(tokens) - 1])
    mx.eval(logits, rows.pending())


def states(rows: Rows, row: Any) -> list[np.ndarray[Any, Any]]:
    return [np.array(array) for array in loosened(rows, take(rows, row, 0)).arrays()]


class KeptStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        native.use_one_path()
        self.folder = Path(tempfile.mkdtemp(prefix="ingot-"))
        self.disk: Disk | None = None
        self.clock = Clock()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
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
            self.disk = Disk.of(
                RecordStore(self.folder, {"model": kind}, DiskLimits(INDEX_ROOM + files, sync=False), SECRET)
            )
        self.begin()
        self.converse(0, 4, 30, Who("a", exact=False, pins=False, marks=True))

    def begin_anew(self) -> None:
        """As an engine does whose step failed."""
        for sequence in list(self.running):
            self.leave(sequence)
        self.waiting.clear()
        self.begin()

    def begin(self) -> None:
        self.rows = self.adapter.new_rows()
        form = form_of(self.adapter, self.rows)
        page = sum(group.page_bytes for group in self.rows.groups) + self.rows.slot_bytes
        costs = StepCosts()
        costs.observe_prefill(100, 100_000.0)  # so much that reading is always quicker
        total = self.adapter.weight_bytes + 60 * page
        budget = Budget(total, self.adapter.weight_bytes, self.adapter.footprint, context=512, widest=WIDEST, rows=4)
        self.budget = budget
        self.reuse = Reuse(
            self.rows, budget, costs, self.pages * page, self.adapter.encoding(self.rows, self.codec, form)
        )
        if self.disk is not None:
            self.reuse.attach(self.disk, form)
            self.keep_time(self.reuse._tier._spiller)  # type: ignore[attr-defined]
        if self.reuse._condenser is not None:
            self.keep_time(self.reuse._condenser)
            self.reuse._condenser._speed = self.decoding
        self.room = Room(budget, self.reuse.known_pages)
        self.let_fail()

    def keep_time(self, whoever: Any) -> None:
        whoever._clock, whoever._since = self.clock, self.clock.now

    def let_fail(self) -> None:
        holders: list[Any] = [self.reuse.encoding, self.rows]
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
        if hasattr(self, "reuse"):
            for sequence in list(self.running):
                self.leave(sequence)
            self.reuse.close()
            self.check_pages()
            for tenant in ("a", "b"):
                self.reuse.forget(tenant)
            assert self.reuse.index.nbytes == 0 and not any(group.pages.kept for group in self.rows.groups)
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
        sequence = Sequence(request, 0, len(self.asked), prompt, 64, seed=0)
        sequence.marks = frozenset({mark} if who.marks else ())
        self.asked.append((prompt, who))
        self.waiting.append(sequence)
        if fate != "waits":
            self.start(sequence)
        if fate == "ends":
            self.finish(sequence)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence is admitted, once what it waits for is read, and given a row."""
        sequence.reserved = len(sequence.tokens) + 64
        coming = [(each, each.reserved) for each in (*self.running, sequence)]
        with self.faults(sequence):
            self.reuse.expect(self.waiting)
            while self.reuse.waits(sequence, ()):
                self.reuse.pause()
                self.reuse.expect(self.waiting)
            if not self.room.fits(coming):
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.reuse.admit(sequence)
            if self.reuse.lacks_pages(sequence):
                self.reuse.make_way(self.room.needed(coming))
            sequence.row = self.rows.new(exact=sequence.request.exact)
            self.reuse.restore(sequence)
            assert sequence.row.length == sequence.computed
            if sequence.computed:
                self.compare(sequence)
            self.make_way()

    def compare(self, sequence: Sequence) -> None:
        """What was taken over is what computing would give, but for what the codec leaves out."""
        tokens = tuple(sequence.tokens[: sequence.computed])
        lossy = self.codec.lossy and not sequence.request.exact
        assert lossy or sequence.codec == RAW
        for mine, anew in zip(states(self.rows, sequence.row), computed_anew(self.kind, tokens), strict=True):
            assert np.mean(np.abs(mine - anew)) < (0.1 * np.std(anew) if lossy else 1e-3)

    def compute(self, sequence: Sequence, count: int) -> None:
        """A chunk of a prompt, up to where it has to end."""
        ahead = [place for place in sequence.marks | sequence.stops if place > sequence.computed]
        end = min([sequence.computed + count, len(sequence.tokens), *ahead])
        run(self.adapter, self.rows, sequence.row, tuple(sequence.tokens[sequence.computed : end]))
        sequence.computed = end
        self.reuse.keep(sequence, last=end == len(sequence.prompt))

    def finish(self, sequence: Sequence) -> None:
        with self.faults(sequence):
            while sequence in self.running and sequence.computed < len(sequence.tokens):
                self.compute(sequence, WIDEST)
            if sequence in self.running:
                sequence.tokens += ANSWER
                self.compute(sequence, WIDEST)
                self.reuse.keep(sequence, last=True)
                self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.reuse._found.pop(sequence, None)
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
                self.reuse.keep(sequence, last=True)
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
            self.make_way(pages * sum(group.page_bytes for group in self.rows.groups))

    def make_way(self, more: int = 0) -> None:
        needed = self.room.needed([(each, each.reserved) for each in self.running]) + more
        self.reuse.make_way(needed)
        reserved, index = self.reuse._tier.reserved, self.reuse.index
        assert index.nbytes <= max(0, self.reuse.limit - reserved)
        if self.reuse._held + reserved > self.reuse.limit:
            needed = self.budget.states  # as much has to go as can
        if needed + self.reuse._alone + reserved > self.budget.states:
            idle = [node for node in index.nodes() if removable(node) and node.record and node.record.idle_bytes]
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
            self.reuse.forget("a")
        elif what == "nothing runs" and not self.running:
            with self.faults():
                self.rows.trim()
                self.reuse.rest()
        elif what == "the queue is looked at":
            with self.faults():
                self.reuse.expect(self.waiting)
        elif what == "the server starts again":
            self.failing = None
            self.reuse.close()
            if self.disk is not None:
                self.disk = Disk.of(RecordStore(self.folder, {"model": self.kind}, self.disk.store.limits, SECRET))
            self.begin_anew()

    @contextmanager
    def faults(self, sequence: Sequence | None = None) -> Iterator[None]:
        """What fails ends the sequence that it was done for; the others go on."""
        try:
            yield
        except Fault as fault:
            if fault.args == ("ask",):  # nobody would ever wait to the end for what was not asked for
                self.begin_anew()
            elif sequence in self.waiting:
                self.waiting.remove(sequence)  # type: ignore[arg-type]
            elif sequence in self.running:
                self.leave(sequence)  # type: ignore[arg-type]

    # What always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "reuse"):
            return
        if self.disk is not None:
            assert self.disk.drain(20)
        self.rows.check()
        self.reuse.check()
        for sequence in self.running:
            assert sequence.row is not None and sequence.row.length >= sequence.computed
        self.check_pages()

    def check_pages(self) -> None:
        """Each page is held as often as rows and records say, and paid for once."""
        kept = [node.record for node in self.reuse.index.nodes() if node.record is not None]
        found: dict[int, Record] = {id(record): record for record in kept}
        for match in self.reuse._found.values():
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
                assert group.window is not None or not pages.unpaid
                paid, held = sum(part.nbytes for part in records), pages.kept * group.page_bytes
                assert paid + group.unpaid_bytes == held, (paid, held)


TestKeptStates = KeptStates.TestCase
TestKeptStates.settings = settings(stateful_step_count=25)

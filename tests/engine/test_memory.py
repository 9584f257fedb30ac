"""The memory model against what mlx really took."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec, RecordCodec
from ingot.cache.footprint import round_up_capacity
from ingot.cache.kv_storage import ReservedStorage
from ingot.cache.page_groups import KVStorage
from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Ended, Failed, Request, Sampling, Stop
from ingot.kernels.device import Device
from tests import engines
from tests.memory import settled

SMALL = 1 << 14
"""Bytes that steps leave behind besides states: tables of positions, masks."""


def reserved_bytes(engine: Engine) -> int:
    """What is held of memory that mlx does not know."""
    storages = [storage for group in engines.runner_of(engine).rows.groups for storage in group.storages]
    return sum(storage.nbytes for storage in storages if isinstance(storage, ReservedStorage))


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid", "moe"])
def test_what_was_predicted_covers_what_was_used(kind: str) -> None:
    import mlx.core as mx

    engine = engines.start(kind, context=2048, widest=128)
    budget: MemoryBudget = engine._loaded.budget
    rng = random.Random(2)
    lengths = [350, 150, 1200, 20, 200]
    asked = [
        Request(
            f"m{number}",
            (tuple(rng.randrange(95) for _ in range(length)),),
            max_tokens=40,
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        for number, length in enumerate(lengths)
    ]
    before = settled()
    reserved = 0
    for stream in [engine.generate(request) for request in asked]:
        for _ in stream:
            reserved = max(reserved, reserved_bytes(engine))
    used = mx.get_peak_memory() - before + reserved
    engine.close()
    states = sum(budget.row_bytes(round_up_capacity(length + 40)) for length in lengths) + budget.slot_bytes(len(asked))
    # Slabs are made a quarter larger than what is asked for.
    assert used <= 1.25 * states + budget.transient
    # And it is no wild guess: a model that asks for ten times too much would refuse what fits.
    assert states <= 10 * used


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is free in here is so because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Breaking:
    """An engine with kept prefixes and running requests, that breaks when it is told to."""

    def __init__(self, kind: str, device: Device | None, codec: PairCodec, live: PairCodec) -> None:
        self.broken = False
        self.engine = engines.start(
            kind, cache_bytes=1 << 24, device=device, wait=self._wait, codec=codec, live=live, widest=64
        )

    def _wait(self, tokens: int) -> None:
        if self.broken:
            import mlx.core as mx

            at_hand = mx.ones(1 << 20)
            mx.eval(at_hand)
            self.broken = False
            raise RuntimeError("[matmul] something nobody foresaw")

    def fill(self) -> list[KVStorage]:
        """Keep some prefixes; gives where all layers' states lie."""
        for number in range(2):
            prompt = tuple((7 * at + number) % 95 for at in range(100))
            assert isinstance(engines.answer(self.engine, asked(f"kept{number}", prompt))[-1], Ended)
        return [storage for group in engines.runner_of(self.engine).rows.groups for storage in group.storages]

    def break_a_step(self) -> None:
        streams = [self.engine.generate(asked(f"running{number}", tuple(range(80)), 500)) for number in range(2)]
        next(iter(streams[0]))
        self.broken = True
        assert all(isinstance([*stream][-1][-1], Failed) for stream in streams)

    def break_the_books(self) -> None:
        rows = engines.runner_of(self.engine).rows
        self.engine._loop.run(lambda: rows._free.append(0))
        self.engine._loop.run(lambda: None)  # before which it has rested

    def active(self) -> int:
        import mlx.core as mx

        return self.engine._loop.run(mx.get_active_memory)


def asked(name: str, prompt: tuple[int, ...], tokens: int = 4) -> Request:
    return Request(
        name, (prompt,), max_tokens=tokens, sampling=Sampling(temperature=0.0), stop=Stop(ignore_eos=True), pin=True
    )


K8V4 = RecordCodec(CodecName.parse("k8v4"))


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("kind", "codec", "live"),
    [
        ("llama", RAW_CODEC, RAW_CODEC),
        ("window", RAW_CODEC, RAW_CODEC),
        ("hybrid", RAW_CODEC, RAW_CODEC),
        ("kernel", K8V4, RAW_CODEC),
        ("kernel", RAW_CODEC, PairCodec(CodecName.parse("k8v4"))),
    ],
    ids=["llama", "window", "hybrid", "coded records", "coded pages"],
)
def test_a_fault_frees_the_memory_of_all_states_at_once(
    kind: str, codec: PairCodec, live: PairCodec, device: Device | None, no_collector: None
) -> None:
    world = Breaking(kind, device, codec, live)
    world.fill()
    world.break_the_books()
    empty = world.active()
    for breaks in (world.break_a_step, world.break_the_books):
        storages = world.fill()
        assert engines.runner_of(world.engine).prefix_cache.index.nbytes > 0
        full = world.active()
        breaks()
        assert world.active() <= empty + SMALL, breaks
        assert full > empty + SMALL or all(isinstance(storage, ReservedStorage) for storage in storages)
        assert not any(storage.keys or storage.values for storage in storages)
        figures = world.engine.figures
        assert (figures.held_bytes, figures.kept_bytes) == (0, {}) and figures.active_bytes <= empty + SMALL
    assert isinstance(engines.answer(world.engine, asked("next", tuple(range(80))))[-1], Ended)
    world.engine.check()
    world.engine.close()

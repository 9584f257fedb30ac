"""What a model's layers can ask for is met when it is loaded: nobody who waits for an answer waits for a compiler."""

from __future__ import annotations

import random
from collections.abc import Iterable

import mlx.core as mx
import pytest

from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.speculation.lookup import Lookup
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kinds import Kind, kind_of
from ingot.kernels.gpu.texts import Kernel, Work
from ingot.kernels.paged.kernels import available
from tests import engines

pytestmark = pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Kind]:
    """All kinds that were launched so far."""
    kinds: set[Kind] = set()
    launch = Emulator.__call__

    def noted(self: Emulator, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        kinds.add(kind_of(kernel, inputs, work))
        return launch(self, kernel, inputs, work)

    monkeypatch.setattr(Emulator, "__call__", noted)
    return kinds


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> set[Kind]:
    """All kinds that were to be compiled at once so far."""
    kinds: set[Kind] = set()

    prepare = Emulator.prepare

    def noted(self: Emulator, asked: Iterable[Kind]) -> None:
        kinds.update(asked)
        prepare(self, kinds)

    monkeypatch.setattr(Emulator, "prepare", noted)
    return kinds


def asked(turn: str) -> list[Request]:
    """Of many lengths, some of which say things again and again."""
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(95) for _ in range(length)) for length in (3, 64, 65, 200)]
    greedy = Sampling(temperature=0.0)
    return [
        Request(f"{turn}{number}", (tokens * 2,), max_tokens=30, sampling=greedy, stop=Stop(ignore_eos=True))
        for number, tokens in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", ["kernel", "kernel-window", "kernel-hybrid"])
def test_serving_launches_no_kind_that_loading_did_not_prepare(
    kind: str, launched: set[Kind], prepared: set[Kind]
) -> None:
    engine = engines.start(
        kind, context=540, device=engines.GPU, proposers=[Lookup()], guessed_tokens=8, cache_bytes=1 << 24
    )
    at_load = set(prepared)
    for turn in ("first", "again"):
        for stream in [engine.generate(request) for request in asked(turn)]:
            assert list(stream)
    engine.check()
    engine.close()
    assert prepared == at_load, "nothing is prepared while somebody waits"
    assert launched and launched <= prepared

"""The runner under a scheduler, step by step, without the engine's thread: what happens when is the test's to say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.forward_pass import SequenceResult
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Request, Sampling
from ingot.engine.runner import LaunchedStep, Runner
from ingot.engine.scheduler import Scheduler
from ingot.engine.sequence import TokenSequence
from ingot.engine.step_costs import StepCosts
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import adapt_model
from tests import engines, tiny

pytestmark = pytest.mark.usefixtures("rules")

PROMPT = tuple((7 * number) % 95 for number in range(400))

devices = pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "gpu"])


class Steps:
    """A runner and its scheduler. A step's results are read after the next one was launched, as on a GPU."""

    def __init__(self, device: Device | None, *, widest: int = 64, kind: str = "llama") -> None:
        adapter = adapt_model(tiny.build(kind), tiny.CONFIGS[kind], device or current_device(), widest=widest)
        costs = StepCosts(mixes=adapter.mixed)
        budget = MemoryBudget(1 << 28, 0, adapter.footprint, context=2048, widest=widest, rows=8)
        self.runner = Runner(adapter, budget, costs, 0)
        self.scheduler = Scheduler(self.runner.room.fits, lambda _: widest, self.runner.prefix_cache, costs, 8, 100.0)
        self._tickets = iter(range(1000))
        self._pending: LaunchedStep | None = None

    def add(self, request: Request, limit: int) -> TokenSequence:
        sequence = TokenSequence(request, 0, next(self._tickets), request.prompts[0], limit, 0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[SequenceResult]:
        plan = self.scheduler.plan(0.0)
        step = self.runner.launch(plan, lambda: None)
        previous, self._pending = self._pending, step
        return list(self._read(previous)) if previous is not None else []

    def catch_up(self) -> list[SequenceResult]:
        """Read what is still to be read."""
        previous, self._pending = self._pending, None
        return list(self._read(previous)) if previous is not None else []

    def run(self, sequence: TokenSequence) -> list[SequenceResult]:
        """Steps until it is through."""
        found: list[SequenceResult] = []
        while sequence.produced < sequence.limit:
            found += self.step()
        return found

    def _read(self, step: LaunchedStep) -> Iterator[SequenceResult]:
        for waves in self.runner.collect(step):
            for result in (result for results in waves for result in results):
                if result.token is not None:
                    result.sequence.tokens.append(result.token)
                yield result


def prompt_logprobs(results: list[SequenceResult], sequence: TokenSequence) -> list[float]:
    return [found.chosen[1] for each in results if each.sequence is sequence for found in each.prompt]


@devices
def test_a_prompt_that_is_preempted_while_it_is_scored_is_scored_once(device: Device | None) -> None:
    scored = Request("s", (PROMPT,), sampling=Sampling(temperature=0.0, prompt_logprobs=0), background=True)
    plain = Steps(device)
    alone = plain.add(scored, 4)
    expected = prompt_logprobs(plain.run(alone), alone)
    assert len(expected) == len(PROMPT) - 1

    steps = Steps(device)
    sequence = steps.add(scored, 4)
    found = [*steps.step(), *steps.step(), *steps.step()]
    other = steps.add(Request("o", ((5, 6),), sampling=Sampling(temperature=0.0)), 3)
    found += steps.run(other)
    assert sequence.preemptions == 1
    found += steps.run(sequence)
    assert prompt_logprobs(found, sequence) == pytest.approx(expected, abs=1e-3)
    assert sequence.tokens == alone.tokens


PENALTIES = [Sampling(seed=3, frequency_penalty=0.8), Sampling(temperature=0.0, repetition_penalty=1.4)]


@devices
@pytest.mark.parametrize("sampling", PENALTIES, ids=["frequency", "repetition"])
def test_penalties_see_tokens_that_nobody_has_read_yet(device: Device | None, sampling: Sampling) -> None:
    late, soon = Steps(device), Steps(device)
    wanted = Request("p", (PROMPT[:9],), sampling=sampling)
    ahead, behind = late.add(wanted, 16), soon.add(wanted, 16)
    late.run(ahead)
    while behind.produced < 16:
        soon.step()
        soon.catch_up()
    assert ahead.tokens == behind.tokens
    plain = Steps(device)
    other = plain.add(Request("o", (PROMPT[:9],), sampling=Sampling(seed=3, temperature=sampling.temperature)), 16)
    plain.run(other)
    assert other.tokens != ahead.tokens


@devices
def test_a_long_row_takes_memory_for_itself_alone_and_gives_it_back(device: Device | None) -> None:
    steps = Steps(device, widest=512)
    short = [steps.add(Request(f"s{n}", (PROMPT[: 8 + n],), sampling=Sampling(temperature=0.0)), 24) for n in range(3)]
    steps.step()
    [group] = steps.runner.rows.groups
    assert group.pages.used == 3
    long = steps.add(Request("l", (PROMPT * 2,), sampling=Sampling(temperature=0.0)), 2)
    most = 0
    while long.produced < long.limit:
        steps.step()
        most = max(most, group.pages.used)
    assert most <= 3 + 13 + 3, "one that is long makes no room for the others"
    steps.step()
    assert group.pages.used <= 6
    alone = Steps(device, widest=512)
    for row in short:
        steps.run(row)
        same = alone.add(row.request, 24)
        alone.run(same)
        assert row.tokens == same.tokens

"""What the controller is told of the rounds that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.controller import Round
from ingot.engine.speculation.proposer import Offer, Proposal
from ingot.kernels.device import Device
from tests import engines
from tests.memory import pretended
from tests.rehearsed import Rehearsed

TOKENS = 24


class Silent(Rehearsed):
    """Offers, and then has nothing to say in every other round."""

    def __init__(self, *, offering: bool) -> None:
        super().__init__({})
        self._offering, self._asked = offering, 0

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        return [Offer(self.name, 2) if self._offering else None for _ in rows]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        self._asked += 1
        return [Proposal((1, 2)[: count * (self._asked % 2)], self.name) for count in counts]


Started = Callable[[Device | None, bool], tuple[Engine, list[Round]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    running: list[Engine] = []

    def start(device: Device | None, offering: bool) -> tuple[Engine, list[Round]]:
        engine = engines.start("llama", device=device, proposers=[Silent(offering=offering)], guessed_tokens=2)
        running.append(engine)
        rounds: list[Round] = []
        monkeypatch.setattr(
            engine._generation._books.speculation._controller, "observe", lambda round, passed: rounds.append(round)
        )
        return engine, rounds

    yield start
    for engine in running:
        engine.check()
        engine.close()


def decode(engine: Engine) -> None:
    sampling, stop = Sampling(temperature=0.0), Stop(ignore_eos=True)
    engines.answer(engine, Request("r", (tuple(range(9)),), max_tokens=TOKENS, sampling=sampling, stop=stop))
    engine.check()  # when the step is over that ended it


def test_where_the_device_works_ahead_a_round_that_looked_for_guesses_in_vain_has_waited(started: Started) -> None:
    engine, rounds = started(engines.GPU, True)
    decode(engine)
    *before, last = rounds
    silent = [round for round in before if not round.outcomes]
    assert silent and all(round.waited for round in silent)
    assert not last.waited  # there is no room for a guess: one more token is drawn, and that is all
    assert all(round.waited for round in rounds if round.outcomes)


def test_a_round_for_which_nobody_offered_anything_has_not_waited(started: Started) -> None:
    engine, rounds = started(engines.GPU, False)
    decode(engine)
    assert len(rounds) == TOKENS - 1 and not any(round.waited for round in rounds)


@pretended
def test_where_nothing_works_ahead_only_guesses_are_waited_for(started: Started) -> None:
    engine, rounds = started(None, True)
    decode(engine)
    assert {round.waited == bool(round.outcomes) for round in rounds} == {True}
    assert {bool(round.outcomes) for round in rounds} == {True, False}

"""Plain decoding against each proposer of a server, on the same questions, in turns."""

from __future__ import annotations

import json
import queue
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingot.cli.bench_workloads import WORKLOADS, Body, body_of
from ingot.cli.client import Client, ServerError

PLAIN: Final = "off"
LEAST_TOKENS: Final = 2
"""An answer of fewer has no speed: the first comes with the prompt."""
WARM_UP: Final = -1
"""The number of the round that is not measured: what is made at first use is made then, and the server learns what
guessing costs."""


@dataclass(frozen=True, slots=True)
class GuessingPlan:
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 3
    streams: int = 1  # questions at once
    output_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its text, its calls included, and what the server's receipt says of it."""

    text: str
    tokens: int
    decode_s: float
    proposed: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def speed(self) -> float | None:
        """Tokens a second, from the first on."""
        return (self.tokens - 1) / self.decode_s if self.tokens >= LEAST_TOKENS and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A workload done by one proposer, against plain decoding of the same questions in the same rounds."""

    workload: str
    proposer: str
    answers: int
    same: int  # texts that are those of plain decoding
    speed: float | None  # tokens a second of one stream
    ratio: float | None  # of the speeds, the median of the rounds'
    acceptance: float | None  # of the guessed tokens, how many were right
    tokens_per_pass: float | None


def proposers_of(client: Client) -> tuple[str, ...]:
    """What to set against plain decoding: each that the server offers, and all together. Raises ServerError."""
    try:
        model = client.get("models")["data"][0]
        offered = tuple(model["proposers"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{client.url} does not say who guesses ahead there: it is no ingot that can") from None
    if not offered:
        raise ServerError(f"nobody guesses ahead at {client.url}: start it with --speculate")
    return (*offered, "auto") if len(offered) > 1 else offered


def measure(client: Client, plan: GuessingPlan, proposers: Sequence[str]) -> Iterator[Outcome]:
    """Outcomes by workload, plain decoding first. Raises ServerError."""
    _round(client, plan, plan.workloads[0], WARM_UP, proposers)
    for workload in plan.workloads:
        rounds = [_round(client, plan, workload, number, proposers) for number in range(plan.rounds)]
        for proposer in (PLAIN, *proposers):
            yield outcome(workload, proposer, rounds)


def outcome(workload: str, proposer: str, rounds: Sequence[Mapping[str, Sequence[Answered]]]) -> Outcome:
    """What the rounds, each with the answers by proposer, say of one of them."""
    answers = [one for each in rounds for one in each[proposer]]
    pairs = [pair for each in rounds for pair in zip(each[proposer], each[PLAIN], strict=True)]
    speeds = [(_speed(each[proposer]), _speed(each[PLAIN])) for each in rounds]
    ratios = [own / plain for own, plain in speeds if own and plain]
    own_speeds = [own for own, _ in speeds if own]
    proposed, passes = sum(one.proposed for one in answers), sum(one.passes for one in answers)
    accepted = sum(one.accepted for one in answers)
    return Outcome(
        workload,
        proposer,
        answers=len(answers),
        same=sum(own.text == plain.text for own, plain in pairs),
        speed=statistics.median(own_speeds) if own_speeds else None,
        ratio=statistics.median(ratios) if ratios else None,
        acceptance=accepted / proposed if proposed else None,
        tokens_per_pass=1 + accepted / passes if passes else None,
    )


def _speed(answers: Sequence[Answered]) -> float | None:
    speeds = [one.speed for one in answers if one.speed is not None]
    return statistics.fmean(speeds) if speeds else None


def _round(
    client: Client, plan: GuessingPlan, workload: str, number: int, proposers: Sequence[str]
) -> dict[str, list[Answered]]:
    """Everybody answers the same questions, one after another; another one begins each time."""
    modes = [PLAIN, *proposers]
    first = number % len(modes)
    asked = [body_of(workload, f"{plan.seed}/{number}/{stream}") for stream in range(plan.streams)]
    told = {"model": "default", "temperature": 0, "max_tokens": plan.output_tokens}
    answered = {}
    for mode in modes[first:] + modes[:first]:
        # Under salts of their own they share nothing: neither prompts, nor what was answered before.
        bodies = [
            body | told | {"speculate": mode, "cache_salt": f"bench {plan.seed}/{workload}/{number}/{stream}/{mode}"}
            for stream, body in enumerate(asked)
        ]
        answered[mode] = _at_once(client, bodies)
    return answered


def _at_once(client: Client, bodies: Sequence[Body]) -> list[Answered]:
    done: queue.SimpleQueue[tuple[int, Answered | ServerError]] = queue.SimpleQueue()

    def ask(number: int, body: Body) -> None:
        try:
            done.put((number, read(client.post("chat/completions", body))))
        except ServerError as error:
            done.put((number, error))

    for asked in enumerate(bodies):
        # Daemons: when the user interrupts, the program must not wait for answers that nobody wants.
        threading.Thread(target=ask, args=asked, daemon=True).start()
    told = dict(done.get() for _ in bodies)
    return [_or_raise(told[number]) for number in range(len(bodies))]


def _or_raise(told: Answered | ServerError) -> Answered:
    if isinstance(told, ServerError):
        raise told
    return told


def read(answer: Any) -> Answered:
    """An answer of ours. Raises ServerError where it lacks its receipt."""
    try:
        message, receipt = answer["choices"][0]["message"], answer["ingot"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        guessed = receipt.get("speculation") or {}
        return Answered(
            json.dumps([message.get("reasoning_content"), message.get("content"), calls]),
            answer["usage"]["completion_tokens"],
            receipt["timing"]["decode_s"],
            *(guessed.get(name, 0) for name in ("proposed", "accepted", "passes")),
        )
    except (KeyError, IndexError, TypeError):
        raise ServerError("the server's answer has no receipt: it is no ingot") from None

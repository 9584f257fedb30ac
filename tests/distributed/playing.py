"""What a group of ranks is asked, and one process alone: the same requests, whose answers have to be the same."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.distributed.follower import run_follower
from ingot.distributed.place import read_rank_config
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Event, Failed, Request, Sampling, Stop, TextDelta
from ingot.text.grammar.grammars import Grammars
from tests.engines import answer, text_of

GREEDY = Sampling(temperature=0.0)
ON = Stop(ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"w": {"enum": ["yes", "no"]}},
    "required": ["w"],
    "additionalProperties": False,
}
SEATS = 8
SEEN = 10
"""Characters that are read of answers that would not end."""


@dataclass
class Played:
    """Answers, and figures that show that what was to be played was. In as few steps as that takes: each waits for
    several collectives, which take long where ranks share busy cores."""

    resumed: list[str]  # prompts that begin like another
    matched: list[int]  # tokens that these took over
    together: list[str]  # greedy, sampled, guided, and texts that repeat themselves
    drafted: int
    crowded: list[str]  # of those who make way for others, and come back, if that is played
    preemptions: int
    steps: int


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((7 * number + 13 * position + position * position) % 90 + 1 for position in range(length))


def play(engine: Engine, grammars: Grammars, *, crowd: bool) -> Played:
    resumed, matched = _resume(engine, prompt(20, 1400 if crowd else 150))
    before = engine.speculation.draft_tokens
    together = _all(
        engine,
        [
            *[_request(f"a{each}", prompt(each + 3, 3 + 37 * each)) for each in range(3)],
            *[_request(f"s{each}", prompt(each + 50, 9), Sampling(seed=each)) for each in range(2)],
            Request("g", (prompt(40, 6),), 60, sampling=Sampling(seed=1), grammar=grammars.json_schema(SCHEMA)),
            *[_request(f"l{each}", prompt(60, 8) * 6, length=12) for each in range(2)],
        ],
    )
    drafted = engine.speculation.draft_tokens - before
    crowded, preemptions = _crowd(engine) if crowd else ([], 0)
    engine.check()
    return Played(resumed, matched, together, drafted, crowded, preemptions, engine.last_step)


def _resume(engine: Engine, shared: tuple[int, ...]) -> tuple[list[str], list[int]]:
    answer(engine, _request("first", shared, length=1))
    texts, matched = [], []
    for each in range(2):
        events = answer(engine, _request(f"r{each}", (*shared[: len(shared) - 20 * each], *prompt(each + 30, 12))))
        texts.append(text_of(events))
        matched.append(events[-1].cache[0].matched)  # type: ignore[union-attr]
    return texts, matched


def _request(id: str, tokens: tuple[int, ...], sampling: Sampling = GREEDY, length: int = 4, **more: Any) -> Request:
    return Request(id, (tokens,), length, sampling=sampling, stop=ON, **more)


def _all(engine: Engine, requests: list[Request]) -> list[str]:
    streams = [engine.generate(request) for request in requests]
    return [text_of([event for batch in stream for event in batch]) for stream in streams]


def _written(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _crowd(engine: Engine) -> tuple[list[str], int]:
    """One tenant has all seats, for longer than anybody would wait, when another comes: who is answered, too, so that
    somebody was preempted."""
    prompts = [prompt(each + 3, 3 + 17 * each) for each in range(SEATS)]
    requests = [_request(f"b{each}", tokens, length=1500, tenant="one") for each, tokens in enumerate(prompts)]
    first = [engine.generate(request) for request in requests]
    begun = [next(iter(stream)) for stream in first]
    others = _all(engine, [_request(f"o{each}", prompt(each, 10), length=3, tenant="other") for each in range(2)])
    preemptions = sum(status.preemptions for status in engine.status())
    texts = []
    for request, stream, events in zip(requests, first, begun, strict=True):
        while len(read := _written(events)) < SEEN:
            events += next(iter(stream))
        texts.append(read[:SEEN])
        assert engine.cancel(request.id)
        *_, last = [event for batch in stream for event in batch]
        assert isinstance(last, Failed), "a cancelled request ran to its end"
    return [*texts, *others], preemptions


def started(folder: Path, settings: Settings, **more: Any) -> Engine:
    return start_engine(settings, folder, name="tiny", source="random weights", **more)


def played(folder: Path, settings: Settings, *, crowd: bool) -> Played:
    engine = started(folder, settings)
    grammars = Grammars(engine.tokenizer, engine.card.vocab)
    try:
        return play(engine, grammars, crowd=crowd)
    finally:
        grammars.close()
        engine.close()


def main(games: list[tuple[str, dict[str, Any], bool]]) -> None:
    """One after another, by the same processes: to start them takes longer than all that they play."""
    where = read_rank_config(os.environ)
    for folder, wanted, crowd in games:
        settings = Settings(**wanted)
        if where is not None and where.rank:
            run_follower(settings, Path(folder), where, lambda step: None)
        else:
            print(json.dumps(asdict(played(Path(folder), settings, crowd=crowd))), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

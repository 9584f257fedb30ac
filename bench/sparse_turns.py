"""A conversation about a long text with specprefill, turn by turn: time to the first token if prompts are computed
completely, if each turn is scored again, and if it continues from the turn before; on random models.

python -m bench.sparse_turns --target llama-15m --draft dispatch --tokens 2048
python -m bench.sparse_turns --target llama-8b --draft llama-600m --dtype bfloat16 --memory-gb 24 --tokens 32768
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import count

from bench.engine import started
from bench.random_models import SHAPES
from bench.sparse import first_token_s, make, scorer, shape
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, SequenceEnded, SpecPrefillRequest, Stop
from ingot.engine.specprefill.prefill import SpecPrefillSetup

ANSWER, QUESTION = 64, 400
"""Tokens of each answer, and of each question behind it."""
TURNS = 4
VOCAB = 500
NUMBERS = count()
WAYS = {"whole": None, "scored anew": SpecPrefillRequest(forced=True), "gone on": SpecPrefillRequest()}


def said(tokens: int, seed: str) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(VOCAB) for _ in range(tokens))


def turn(engine: Engine, prompt: tuple[int, ...], way: str, salt: str) -> tuple[Ended, tuple[int, ...]]:
    request = Request(
        f"turn-{next(NUMBERS)}",
        (prompt,),
        max_tokens=ANSWER,
        sampling=Sampling(temperature=0.0),
        stop=Stop(ignore_eos=True),
        specprefill=WAYS[way],
        salt=salt,
    )
    events: list[Event] = [event for batch in engine.generate(request) for event in batch]
    if isinstance(events[-1], Failed):
        raise events[-1].error
    assert isinstance(events[-1], Ended)
    return events[-1], next(event.tokens for event in events if isinstance(event, SequenceEnded))


def conversation(engine: Engine, way: str, tokens: int, name: str) -> list[Ended]:
    """The ends of its turns. Who is scored anew has a salt of his own each time, so that nothing is taken over."""
    prompt, ends = said(tokens, name), []
    for number in range(TURNS):
        salt = f"{way} {name}" + (f" {number}" if way == "scored anew" else "")
        end, answer = turn(engine, prompt, way, salt)
        ends.append(end)
        prompt = (*prompt, *answer, *said(QUESTION, f"{name} {number}"))
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=SHAPES, default="llama-15m")
    parser.add_argument("--draft", choices=SHAPES, default="dispatch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text that the conversation is about")
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--memory-gb", type=float, default=2.0)
    asked = parser.parse_args()
    context = asked.tokens + TURNS * (ANSWER + QUESTION) + 1024
    engine = started(
        asked.target,
        shape(asked.target, context),
        lambda: make(asked.target, asked.dtype, context),
        memory_gb=asked.memory_gb,
        context=context,
        cache_gb=asked.memory_gb / 2,
        specprefill=lambda: SpecPrefillSetup(
            scorer(asked.draft, asked.dtype, context, asked.memory_gb), asked.tokens // 2, asked.keep
        ),
    )
    print(f"| turn | {' | '.join(WAYS)} |", *["|---" * (len(WAYS) + 1) + "|"], sep="\n")
    try:
        for way in WAYS:
            conversation(engine, way, asked.tokens, "to warm up")
        found = {way: conversation(engine, way, asked.tokens, "to measure") for way in WAYS}
    finally:
        engine.close()
    for number in range(TURNS):
        seconds = " | ".join(f"{first_token_s(found[way][number]):.3f} s" for way in WAYS)
        print(f"| {number + 1} | {seconds} |")
    told = [report for end in found["gone on"] for report in end.specprefill]
    counts = [each.unused or f"{each.reused} reused, {each.kept} of {each.scored} kept" for each in told]
    print("gone on:", "; ".join(counts))
    behind = {way: sum(end.timing.decode for end in ends) for way, ends in found.items()}
    print(f"tokens per second after it, relative to complete prompts: {behind['whole'] / behind['gone on']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

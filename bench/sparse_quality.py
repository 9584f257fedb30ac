"""What specprefill loses, on the foundry's models: with a draft model, with token statistics, and with random tokens.

python -m bench.sparse_quality --model dense --samples 16
python -m bench.sparse_quality --model hybrid --tasks 1024,required:1200 --first-seed 5000
python -m bench.sparse_quality --choosers draft --tasks 1024 --fractions 0.1,0.05,0.02 --qualities 0.99,0.9

`recall` is the share of questions about pairs in a text of that many tokens whose answer is right to the last token,
`tools` the same for tool calls after a question about prose of that many tokens and its answer. The models were never
trained to call tools after long texts, and some calls are wrong even with all tokens; those count, too, or any change
would look like a loss. For `required` calls the opening is given, as a server does it then: what counts is which tool
is called with which arguments. `perplexity` is that of the right answers.

With a quality, the draft model keeps as many of the best tokens as have that share of its concentrated attention. The
second table shows what that share says: how many answers are right, by the share that was kept, whatever chose it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from foundry import corpus
from foundry.lesson import Lesson, assistant, seeded
from foundry.package import MODELS
from foundry.recall import recall_lesson
from foundry.rows import written
from foundry.shapes import SHAPES
from foundry.tool_lessons import tool_lesson
from ingot.engine.request import Request, TokenRange
from ingot.engine.sequence import TokenSequence as Reading
from ingot.engine.specprefill.scorers import rarity_scores
from ingot.engine.specprefill.selection import CHUNK_TOKENS, ScoredPrompt, required_tokens, select_tokens

KEEPS = (0.5, 0.3, 0.2, 0.1)
QUALITIES = (0.99, 0.9)
MASSES = (0.99, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Of the shares of attention that were kept, the lowest of each row of the second table."""
TASKS = "1024,2048,3800,tools:1200,required:1200"
"""Lengths of texts to recall pairs of, and of those that were asked about before tools are called."""
Judge = Callable[[tuple[int, ...]], ScoredPrompt]


@dataclass(frozen=True, slots=True)
class Sample:
    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    whole: tuple[TokenRange, ...] = ()


class Outcome(NamedTuple):
    right: bool
    nats: float
    tokens: int
    kept: float


@dataclass(slots=True)
class Tally:
    right: int = 0
    count: int = 0
    nats: float = 0.0
    tokens: int = 0
    kept: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.count += 1
        self.right += outcome.right
        self.nats += outcome.nats
        self.tokens += outcome.tokens
        self.kept += outcome.kept

    def __str__(self) -> str:
        shares = f"{self.right / self.count:.2f} ({np.exp(self.nats / self.tokens):.2f})"
        return f"{shares} of {self.kept / self.count:.2f}"


def recalls(style: str, length: int, first: int) -> Iterator[Sample]:
    for seed in count(first):
        asked, answer = written(recall_lesson(seeded(seed, held_out=True), length), style)
        yield Sample(f"recall {length}", tuple(asked), tuple(answer))


def calls(style: str, length: int, first: int) -> Iterator[Sample]:
    """Tool calls behind a question about a text, and its answer."""
    for taught, earlier in _lessons(length, first):
        asked, answer = written(_behind(taught, earlier), style)
        plain, _ = written(taught, style)
        yield Sample(f"tools {length}", tuple(asked), tuple(answer), _ends_in_common(asked, plain))


def required_calls(style: str, length: int, first: int) -> Iterator[Sample]:
    """The same, without thinking, where there must be a call: what opens it is the prompt's last token."""
    for taught, earlier in _lessons(length, first):
        at_once = replace(taught, thinking=None)
        asked, (opening, *answer) = written(_behind(at_once, earlier), style)
        plain, _ = written(at_once, style)
        whole = _ends_in_common([*asked, opening], [*plain, opening])
        yield Sample(f"required {length}", (*asked, opening), tuple(answer), whole)


KINDS = {"": recalls, "tools": calls, "required": required_calls}


def posed(task: str, style: str, first: int) -> Iterator[Sample]:
    """Raises ValueError for what is no task."""
    kind, _, length = task.rpartition(":")
    if kind not in KINDS:
        raise ValueError(f"'{task}' is neither a length nor tools:length nor required:length")
    return KINDS[kind](style, int(length), first)


def _lessons(length: int, first: int) -> Iterator[tuple[Lesson, Lesson]]:
    """Calls of tools, and what was asked before them about a text."""
    prose = corpus.documents(held_out=True)
    for seed in count(first):
        chance = seeded(seed, held_out=True)
        taught = tool_lesson(chance)
        while taught.kind != "tool":
            taught = tool_lesson(chance)
        yield taught, recall_lesson(chance, length, prose)


def _behind(taught: Lesson, earlier: Lesson) -> Lesson:
    """The same lesson, once something else was asked and answered."""
    return replace(taught, messages=[*earlier.messages, assistant(earlier.content), *taught.messages])


def _ends_in_common(long: Sequence[int], short: Sequence[int]) -> tuple[TokenRange, ...]:
    begin = next((at for at, (one, other) in enumerate(zip(long, short, strict=False)) if one != other), len(short))
    pairs = zip(reversed(long), reversed(short), strict=False)
    end = next((at for at, (one, other) in enumerate(pairs) if one != other), len(short))
    return (0, begin), (len(long) - end, len(long))


def by_chance(prompt: tuple[int, ...]) -> ScoredPrompt:
    dice = np.random.default_rng(len(prompt))
    chunks = dice.random(-(-len(prompt) // CHUNK_TOKENS), dtype=np.float32)
    return ScoredPrompt(np.repeat(chunks, CHUNK_TOKENS)[: len(prompt)])


def by_statistics(prompt: tuple[int, ...]) -> ScoredPrompt:
    return ScoredPrompt(rarity_scores(prompt))


class ByDraft:
    def __init__(self, adapter: Any) -> None:
        from ingot.engine.memory_budget import MemoryBudget
        from ingot.engine.specprefill.scorers import DraftScorer
        from ingot.engine.speculation.draft_model import LONGEST_DRAFT_PASS, DraftModel

        total = adapter.weight_bytes + (1 << 28)
        budget = MemoryBudget(
            total, adapter.weight_bytes, adapter.footprint, context=adapter.context, widest=LONGEST_DRAFT_PASS, rows=1
        )
        self._scorer = DraftScorer(DraftModel(adapter, budget))

    def __call__(self, prompt: tuple[int, ...]) -> ScoredPrompt:
        scoring = self._scorer.score(Reading(Request("bench", (prompt,), cache=False), 0, 0, prompt, 1, 0))
        while True:
            try:
                next(scoring)
            except StopIteration as done:
                scored: ScoredPrompt = done.value
                return scored


def answered(adapter: Any, sample: Sample, kept: np.ndarray) -> tuple[bool, float]:
    """Whether a greedy answer to what is kept is the right one, and how many nats the right one takes."""
    import mlx.core as mx

    from ingot.cache.forward_batch import ForwardPart

    rows = adapter.new_batch_state()
    row, behind = rows.new(), sample.answer[:-1]
    tokens = [*(sample.prompt[place] for place in kept.tolist()), *behind]
    positions = mx.array([*kept.tolist(), *range(len(sample.prompt), len(sample.prompt) + len(behind))], dtype=mx.int32)
    part = ForwardPart((row,), len(tokens), positions, len(sample.prompt) + len(behind))
    at = range(len(kept) - 1, len(tokens))
    logits = adapter.run(rows, mx.array(tokens, dtype=mx.uint32), [part], at).astype(mx.float32)
    wanted = mx.array(sample.answer)
    likely = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), wanted[:, None], axis=-1)
    right = bool(mx.all(mx.argmax(logits, axis=-1) == wanted).item())
    return right, -float(likely.sum().item())


Found = dict[tuple[str, str, str], Tally]
"""By task, who chose, and how much."""


def tallied(
    target: Any,
    judges: dict[str, Judge],
    samples: Sequence[Sample],
    keeps: Sequence[float] = KEEPS,
    qualities: Sequence[float] = (),
) -> tuple[Found, dict[float, Tally]]:
    """What came of each choice; and of all whose judge attends to something, by MASSES."""
    window = max((group.window or 0 for group in target.new_batch_state().groups), default=0)
    found: Found = {}
    by_mass: dict[float, Tally] = {}
    for sample in samples:
        flags = required_tokens(len(sample.prompt), sample.whole, window=window)
        chosen: dict[tuple[str, str], tuple[np.ndarray, float | None]] = {
            ("all", "1.0"): (np.arange(len(sample.prompt)), None)
        }
        for name, judge in judges.items():
            scored = judge(sample.prompt)
            for keep in keeps:
                kept = select_tokens(scored.scores, flags, keep)
                chosen[name, str(keep)] = kept, scored.kept_mass(kept, flags)
            for quality in qualities if scored.mass is not None else ():
                kept = select_tokens(scored.scores, flags, 1.0, mass=scored.mass, quality=quality)
                chosen[name, f"quality {quality}"] = kept, scored.kept_mass(kept, flags)
        for (name, much), (kept, mass) in chosen.items():
            result = Outcome(*answered(target, sample, kept), len(sample.answer), len(kept) / len(sample.prompt))
            found.setdefault((sample.task, name, much), Tally()).add(result)
            if mass is not None:
                by_mass.setdefault(next(least for least in MASSES if mass >= least), Tally()).add(result)
    return found, by_mass


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "draft"], default="dense")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--choosers", default="draft,statistics,chance")
    parser.add_argument("--fractions", type=numbers, default=KEEPS)
    parser.add_argument("--qualities", type=numbers, default=QUALITIES)
    asked = parser.parse_args()
    from ingot.kernels.device import current_device
    from ingot.models import adapter as adapters

    here, style = current_device(), SHAPES[asked.model].style
    target = adapters.load_model_adapter(MODELS / asked.model, here)
    made: dict[str, Callable[[], Judge]] = {
        "draft": lambda: ByDraft(adapters.load_model_adapter(MODELS / "draft", here)),
        "statistics": lambda: by_statistics,
        "chance": lambda: by_chance,
    }
    judges = {name: made[name]() for name in asked.choosers.split(",")}
    tasks = asked.tasks.split(",")
    samples = [sample for task in tasks for sample in islice(posed(task, style, asked.first_seed), asked.samples)]
    found, by_mass = tallied(target, judges, samples, asked.fractions, asked.qualities)
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    print(f"{asked.model}: right answers (and their perplexity) by computed fraction")
    print(f"| chosen by | fraction | {' | '.join(tasks)} |")
    print("|---" * (2 + len(tasks)) + "|")
    for name, much in dict.fromkeys((name, much) for _, name, much in found):
        print(f"| {name} | {much} | {' | '.join(str(found[task, name, much]) for task in tasks)} |")
    print("| attention kept | answers | right |\n|---|---|---|")
    for least, tally in sorted(by_mass.items(), reverse=True):
        print(f"| {least} and more | {tally.count} | {tally} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

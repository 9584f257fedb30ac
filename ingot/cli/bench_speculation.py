"""`ingot bench speculate`: what speculation gains on several kinds of work, and whether texts stay the same.

Plain decoding is compared with each proposer of a server, on the same questions, in turns. Variants of a
question differ in names and figures, so that no answer repeats the one before.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ingot.cli.bench import MODEL_HELP, add_bench_flags, measured_server, run_concurrently, write_json
from ingot.cli.client import ServerClient, ServerError
from ingot.cli.flags import (
    CommandParser,
    add_settings,
    number_flag,
    require_parent_folder,
    settings_from_arguments,
)
from ingot.errors import ConfigError, nearest_name
from ingot.version import __version__

ABOUT_BENCH_SPECULATE = (
    "Measure what speculation gains: plain decoding against each proposer that the server offers, on the same "
    "questions, in turns. Texts are compared, too: they must be the same."
)
LOCAL_SECTIONS = ("the model", "the engine")
OUTCOME_HEAD = (
    f"{'workload':<18} {'proposer':<9} {'tok/s':>8} {'ratio':>7} {'accepted':>9} {'tok/pass':>9} {'same text':>10}"
)


def run_bench_speculate(arguments: list[str]) -> int:
    namespace = _bench_speculate_parser().parse(arguments)
    flags = vars(namespace)
    settings = settings_from_arguments(namespace).settings
    plan = read_speculation_plan(flags)
    if "json" in flags:
        require_parent_folder(flags["json"])
    with contextlib.ExitStack() as stack:
        client = measured_server(flags, settings, stack)
        proposers = offered_proposers(client)
        print(f"{client.url}: {', '.join(proposers)} against plain decoding, {plan.rounds} rounds of {plan.streams}")
        print(OUTCOME_HEAD)
        outcomes = []
        for outcome in measure_proposers(client, plan, proposers):
            outcomes.append(outcome)
            print(_outcome_row(outcome), flush=True)
    if "json" in flags:
        report = {"ingot": __version__, "plan": asdict(plan), "outcomes": [asdict(each) for each in outcomes]}
        write_json(flags["json"], report)
    return _report_differences(outcomes)


def _bench_speculate_parser() -> CommandParser:
    parser = CommandParser("bench speculate", ABOUT_BENCH_SPECULATE)
    defaults = SpeculationPlan()
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_bench_flags(parser, defaults.output_tokens, defaults.seed)
    parser.flag("--workloads", metavar="A,B", help=f"some of: {', '.join(WORKLOADS)} (default: all)")
    parser.flag("--rounds", metavar="N", help=f"rounds of each workload (default: {defaults.rounds})")
    parser.flag("--streams", metavar="N", help=f"questions at once (default: {defaults.streams})")
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    return parser


def read_speculation_plan(flags: Mapping[str, Any]) -> SpeculationPlan:
    """The plan that the flags describe. Raises ConfigError."""
    defaults = SpeculationPlan()
    names = flags["workloads"].split(",") if "workloads" in flags else defaults.workloads
    return SpeculationPlan(
        workloads=tuple(dict.fromkeys(_check_workload(name.strip()) for name in names)),
        rounds=number_flag(flags, "rounds", defaults.rounds, low=1),
        streams=number_flag(flags, "streams", defaults.streams, low=1, high=256),
        output_tokens=number_flag(flags, "output_tokens", defaults.output_tokens, low=2),
        seed=number_flag(flags, "seed", defaults.seed, low=0),
    )


def _check_workload(name: str) -> str:
    if name in WORKLOADS:
        return name
    near = nearest_name(name, WORKLOADS)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(f"--workloads: {name[:100]!r} is not one of {', '.join(WORKLOADS)}{hint}")


def _outcome_row(outcome: SpeculationOutcome) -> str:
    return (
        f"{outcome.workload:<18} {'plain' if outcome.proposer == PLAIN_DECODING else outcome.proposer:<9} "
        f"{_format_figure(outcome.speed, '.1f'):>8} {_format_figure(outcome.ratio, '.2f'):>7} "
        f"{_format_figure(outcome.acceptance, '.0%'):>9} {_format_figure(outcome.tokens_per_pass, '.2f'):>9} "
        f"{f'{outcome.same}/{outcome.answers}':>10}"
    )


def _format_figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _report_differences(outcomes: Sequence[SpeculationOutcome]) -> int:
    """Texts that differ make a failed benchmark."""
    wrong = [each for each in outcomes if each.same < each.answers]
    for each in wrong:
        differ = f"{each.answers - each.same} of {each.answers} texts differ from plain decoding"
        print(f"ingot bench: {each.workload}, {each.proposer}: {differ}", file=sys.stderr)
    return 1 if wrong else 0


WorkloadBody = dict[str, Any]

PEOPLE: Final = ("Amara", "Bruno", "Chiyo", "Dagny", "Emeka", "Farah", "Goran", "Hina", "Ivo", "Jonna", "Kofi", "Liv")
CITIES: Final = ("Bergen", "Cusco", "Dakar", "Gdansk", "Hanoi", "Izmir", "Kigali", "Lagos", "Porto", "Quito", "Riga")
GOODS: Final = ("bolts", "cables", "hinges", "lamps", "pumps", "ropes", "screws", "springs", "tiles", "valves")
NOUNS: Final = ("invoice", "parcel", "reading", "recipe", "sensor", "ticket", "vehicle", "visit")
QUESTIONS: Final = (
    "Why do leaves change colour in autumn?",
    "How does a sailing boat move against the wind?",
    "What makes bread rise, and what goes wrong when it does not?",
    "Why is the night sky dark although there are so many stars?",
    "How do noise-cancelling headphones work?",
    "What should somebody know before planting an apple tree?",
    "How does a refrigerator make things cold?",
    "Why do bridges have gaps in them?",
)
WORKLOAD_CODE: Final = """\
from dataclasses import field
from dataclasses import dataclass


@dataclass
class {Noun}:
    name: str
    owner: str
    amount: float = 0.0
    tags: list[str] = field(default_factory=list)


class {Noun}Store:
    def __init__(self) -> None:
        self.items: dict[str, {Noun}] = {{}}

    def add(self, item: {Noun}) -> None:
        if item.name in self.items:
            raise ValueError(f"{{item.name}} is stored already")
        self.items[item.name] = item

    def total(self, owner: str) -> float:
        return sum(item.amount for item in self.items.values() if item.owner == owner)

    def tagged(self, tag: str) -> list[{Noun}]:
        return [item for item in self.items.values() if tag in item.tags]

    def largest(self, count: int = {count}) -> list[{Noun}]:
        ordered = sorted(self.items.values(), key=lambda item: item.amount, reverse=True)
        return ordered[:count]
"""
ORDERS_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "customer": {"type": "string", "maxLength": 20},
                    "city": {"type": "string", "maxLength": 20},
                    "article": {"enum": list(GOODS)},
                    "quantity": {"type": "integer"},
                    "paid": {"type": "boolean"},
                },
                "required": ["customer", "city", "article", "quantity", "paid"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["orders"],
    "additionalProperties": False,
}
TRIP_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "traveller": {"type": "string", "maxLength": 20},
        "departure_city": {"type": "string", "maxLength": 20},
        "destination_city": {"type": "string", "maxLength": 20},
        "passengers": {"type": "integer"},
        "travel_class": {"enum": ["economy", "premium", "business"]},
    },
    "required": ["traveller", "departure_city", "destination_city", "passengers", "travel_class"],
    "additionalProperties": False,
}


def code_edit_work(dice: random.Random) -> WorkloadBody:
    noun = dice.choice(NOUNS)
    code = WORKLOAD_CODE.format(Noun=noun.capitalize(), count=dice.randint(3, 99))
    return _user_message(
        f"Rename the method `total` to `sum_for_{noun}` and change nothing else. Answer with the whole file.\n\n"
        f"```python\n{code}```"
    )


def copy_work(dice: random.Random) -> WorkloadBody:
    lines = "\n".join(f"- {sentence}" for sentence in _order_sentences(dice, 8))
    return _user_message(f"Repeat this list word for word, and write nothing else:\n\n{lines}")


def chat_work(dice: random.Random) -> WorkloadBody:
    return _user_message(f"{dice.choice(PEOPLE)} from {dice.choice(CITIES)} asks: {dice.choice(QUESTIONS)}")


def structured_work(dice: random.Random) -> WorkloadBody:
    text = " ".join(_order_sentences(dice, 3))
    form = {"type": "json_schema", "json_schema": {"name": "orders", "schema": ORDERS_SCHEMA, "strict": True}}
    return _user_message(f"Write these orders as JSON. {text}") | {"response_format": form}


def tool_call_work(dice: random.Random) -> WorkloadBody:
    who, (start, end), others = dice.choice(PEOPLE), dice.sample(CITIES, 2), dice.randint(1, 6)
    function = {"name": "book_flight", "description": "Books a flight.", "parameters": TRIP_SCHEMA, "strict": True}
    return _user_message(f"Book a flight from {start} to {end} for {who} and {others} others, in economy.") | {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


WORKLOADS: Final[Mapping[str, Callable[[random.Random], WorkloadBody]]] = {
    "code edit": code_edit_work,
    "copy": copy_work,
    "chat": chat_work,
    "structured output": structured_work,
    "tool calls": tool_call_work,
}


def workload_body(workload: str, variant: str) -> WorkloadBody:
    """The messages and formats of a request, without its sampling fields."""
    return WORKLOADS[workload](random.Random(f"{workload}/{variant}"))


def _user_message(text: str) -> WorkloadBody:
    return {"messages": [{"role": "user", "content": text}]}


def _order_sentences(dice: random.Random, count: int) -> list[str]:
    return [
        f"{dice.choice(PEOPLE)} from {dice.choice(CITIES)} ordered {dice.randint(2, 900)} "
        f"{dice.choice(GOODS)} "
        f"and {dice.choice(('has paid', 'has not paid yet'))}."
        for _ in range(count)
    ]


PLAIN_DECODING: Final = "off"
LEAST_MEASURED_TOKENS: Final = 2
"""An answer of fewer has no speed: the first comes with the prompt."""
WARM_UP_ROUND: Final = -1
"""The number of the round that is not measured: what is compiled at first use is compiled then, and the server learns
what speculation costs."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 3
    streams: int = 1  # questions at once
    output_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
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
        return (self.tokens - 1) / self.decode_s if self.tokens >= LEAST_MEASURED_TOKENS and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class SpeculationOutcome:
    """A workload done by one proposer, against plain decoding of the same questions in the same rounds."""

    workload: str
    proposer: str
    answers: int
    same: int  # texts that are those of plain decoding
    speed: float | None  # tokens a second of one stream
    ratio: float | None  # of the speeds, the median of the rounds'
    acceptance: float | None  # the share of draft tokens that were accepted
    tokens_per_pass: float | None


def offered_proposers(client: ServerClient) -> tuple[str, ...]:
    """What to compare with plain decoding: each that the server offers, and all together. Raises ServerError."""
    try:
        model = client.get("models")["data"][0]
        offered = tuple(model["proposers"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{client.url} does not list its proposers: it is no ingot that has any") from None
    if not offered:
        raise ServerError(f"{client.url} does not speculate: start it with --speculate")
    return (*offered, "auto") if len(offered) > 1 else offered


def measure_proposers(
    client: ServerClient, plan: SpeculationPlan, proposers: Sequence[str]
) -> Iterator[SpeculationOutcome]:
    """Outcomes by workload, plain decoding first. Raises ServerError."""
    _run_round(client, plan, plan.workloads[0], WARM_UP_ROUND, proposers)
    for workload in plan.workloads:
        rounds = [_run_round(client, plan, workload, number, proposers) for number in range(plan.rounds)]
        for proposer in (PLAIN_DECODING, *proposers):
            yield summarise_outcome(workload, proposer, rounds)


def summarise_outcome(
    workload: str, proposer: str, rounds: Sequence[Mapping[str, Sequence[MeasuredAnswer]]]
) -> SpeculationOutcome:
    """What the rounds, each with the answers by proposer, say of one of them."""
    answers = [one for each in rounds for one in each[proposer]]
    pairs = [pair for each in rounds for pair in zip(each[proposer], each[PLAIN_DECODING], strict=True)]
    speeds = [(_mean_speed(each[proposer]), _mean_speed(each[PLAIN_DECODING])) for each in rounds]
    ratios = [own / plain for own, plain in speeds if own and plain]
    own_speeds = [own for own, _ in speeds if own]
    proposed, passes = sum(one.proposed for one in answers), sum(one.passes for one in answers)
    accepted = sum(one.accepted for one in answers)
    return SpeculationOutcome(
        workload,
        proposer,
        answers=len(answers),
        same=sum(own.text == plain.text for own, plain in pairs),
        speed=statistics.median(own_speeds) if own_speeds else None,
        ratio=statistics.median(ratios) if ratios else None,
        acceptance=accepted / proposed if proposed else None,
        tokens_per_pass=1 + accepted / passes if passes else None,
    )


def _mean_speed(answers: Sequence[MeasuredAnswer]) -> float | None:
    speeds = [one.speed for one in answers if one.speed is not None]
    return statistics.fmean(speeds) if speeds else None


def _run_round(
    client: ServerClient, plan: SpeculationPlan, workload: str, number: int, proposers: Sequence[str]
) -> dict[str, list[MeasuredAnswer]]:
    """Every proposer answers the same questions, one after another; another one begins each time."""

    def post(body: WorkloadBody) -> MeasuredAnswer:
        return read_measured_answer(client.post("chat/completions", body))

    modes = [PLAIN_DECODING, *proposers]
    first = number % len(modes)
    questions = [workload_body(workload, f"{plan.seed}/{number}/{stream}") for stream in range(plan.streams)]
    # Without the cache no request reuses an earlier prompt, and lookup finds no earlier answer: neither of this run,
    # nor of an earlier one on the same server, which asked the same.
    fields = {"model": "default", "temperature": 0, "max_tokens": plan.output_tokens, "cache": "off"}
    answers = {}
    for mode in modes[first:] + modes[:first]:
        bodies = [body | fields | {"speculate": mode} for body in questions]
        answers[mode] = run_concurrently(post, bodies, len(bodies))
    return answers


def read_measured_answer(answer: Any) -> MeasuredAnswer:
    """An answer of ours. Raises ServerError where it lacks its receipt."""
    try:
        message, receipt = answer["choices"][0]["message"], answer["ingot"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        speculation = receipt.get("speculation") or {}
        return MeasuredAnswer(
            json.dumps([message.get("reasoning_content"), message.get("content"), calls]),
            answer["usage"]["completion_tokens"],
            receipt["timing"]["decode_s"],
            *(speculation.get(name, 0) for name in ("proposed", "accepted", "passes")),
        )
    except (KeyError, IndexError, TypeError):
        raise ServerError("the server's answer has no receipt: it is no ingot") from None

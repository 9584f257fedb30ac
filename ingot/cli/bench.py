"""`ingot bench SUBJECT`: measurements of servers. `ingot bench serve` measures a running OpenAI-compatible server under
several loads: so many streams at once, each prompt its own.

Prompts are random words from a seed. They differ from the first word on, so that a prefix cache has nothing to offer,
and their length is calibrated by the server's own count of a probe's tokens. Figures come as a table, as JSON and as a
plot.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from ingot.cli import plots
from ingot.cli.client import ServerClient, ServerError, chunk_delta
from ingot.cli.flags import (
    DEFAULT_URL,
    LOCAL_SECTIONS,
    CommandParser,
    add_settings,
    number_flag,
    parse_whole_number,
    require_parent_folder,
    settings_from_arguments,
    timeout_flag,
)
from ingot.config import SETTINGS, Settings
from ingot.config.foreign import find_foreign
from ingot.errors import ConfigError, nearest_name
from ingot.extras import require_extra
from ingot.quantities import counted
from ingot.version import __version__

T = TypeVar("T")

BENCH_SUBJECTS = {
    "serve": (__name__, "run_bench_serve", "measure a server, running or started here, under several loads"),
    "speculate": (
        "ingot.cli.bench_speculation",
        "run_bench_speculate",
        "measure what speculation gains, on several kinds of work",
    ),
    "peers": (
        "ingot.cli.peers.command",
        "run_bench_peers",
        "compare ingot with other servers on this machine, with the work of an agent",
    ),
}


def run_bench(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_bench_usage())
        return 0
    if arguments[0] not in BENCH_SUBJECTS:
        if (near := nearest_name(arguments[0], BENCH_SUBJECTS)) is not None:
            raise ConfigError(f"unknown subject {arguments[0]}; did you mean {near}?")
        return run_bench_serve(arguments)  # of a MODEL, as other servers have it
    module, run, _ = BENCH_SUBJECTS[arguments[0]]
    code: int = getattr(importlib.import_module(module), run)(arguments[1:])
    return code


def _bench_usage() -> str:
    rows = "\n".join(
        f"  {name:<10} {about} (ingot bench {name} --help)" for name, (*_, about) in BENCH_SUBJECTS.items()
    )
    return f"usage: ingot bench SUBJECT [FLAGS]\n\n{rows}\n\n`ingot bench MODEL` is `ingot bench serve MODEL`."


MODEL_HELP = "a model to serve here, instead of a running server"
ABOUT_BENCH_SERVE = (
    "Measure an OpenAI-compatible server, running or started here with a MODEL: time to first token (TTFT), time "
    "between tokens (ITL) and throughput, at several numbers of concurrent streams."
)


def run_bench_serve(arguments: list[str]) -> int:
    namespace = _bench_serve_parser().parse(arguments)
    settings = settings_from_arguments(namespace).settings
    flags = vars(namespace)
    plan = read_load_plan(flags)
    json_to, plot_to = flags.get("json"), flags.get("plot")
    for path in filter(None, (json_to, plot_to)):
        require_parent_folder(path)
    if plot_to:
        require_plotting(plot_to)

    levels: list[LoadLevel] = []
    with contextlib.ExitStack() as stack:
        client = measured_server(flags, settings, stack)
        target = prepare_target(client, plan)
        prompt = counted(plan.prompt_tokens, "token")
        print(f"{target.model} at {client.url}: about {prompt} in, {plan.output_tokens} out")
        print(load_table_head())
        for concurrency in plan.concurrency:
            levels.append(run_level(target, plan, concurrency))
            print(load_table_row(levels[-1]), flush=True)
    if json_to:
        write_json(json_to, load_report(target, plan, levels))
    if plot_to:
        write_load_plot(plot_to, target, plan, levels)
    return _report_load_errors(levels)


def measured_server(flags: Mapping[str, Any], settings: Settings, stack: contextlib.ExitStack) -> ServerClient:
    """A client of the running server, or of one that is started here and lives as long as `stack`."""
    if flags.get("model") is not None:
        if "url" in flags:
            raise ConfigError("--url names a running server and MODEL one to start: give one of them")
        from ingot.cli.serve import local_server

        return ServerClient(stack.enter_context(local_server(settings)), settings.api_key, timeout=timeout_flag(flags))
    for name in flags:
        foreign = find_foreign(name) if name.startswith("-") else None
        known = SETTINGS.get(name if foreign is None else foreign.row.to)
        if known is not None and name != "model" and known.section in LOCAL_SECTIONS:
            flag = known.flag if foreign is None else name
            raise ConfigError(f"{flag} configures a model that is served here: it needs a MODEL")
    return ServerClient(flags.get("url", DEFAULT_URL), settings.api_key, timeout=timeout_flag(flags))


def _bench_serve_parser() -> CommandParser:
    parser = CommandParser("bench serve", ABOUT_BENCH_SERVE)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    defaults = LoadPlan()
    levels = ",".join(map(str, defaults.concurrency))
    add_bench_flags(parser, defaults.output_tokens, defaults.seed)
    parser.flag("--model", metavar="NAME", dest="name", help="the model to ask for (default: what the server lists)")
    parser.flag("--endpoint", metavar="NAME", help=f"{' or '.join(ENDPOINT_PATHS)} (default: {defaults.endpoint})")
    parser.flag("--concurrency", metavar="N,N", help=f"numbers of streams at once (default: {levels})")
    parser.flag("--prompt-tokens", metavar="N", help=f"prompt length (default: {defaults.prompt_tokens})")
    parser.flag("--requests", metavar="N", help=f"requests a level (default: {REQUESTS_PER_STREAM} a stream)")
    parser.flag("--warmup", metavar="N", help=f"requests before each level (default: {defaults.warmup})")
    parser.flag("--plot", metavar="FILE", type=Path, help="plot the figures here (.png, .svg or .pdf)")
    add_settings(parser, (*LOCAL_SECTIONS, "the rest"))
    return parser


def add_bench_flags(parser: CommandParser, output_tokens: int, seed: int) -> None:
    """Those that every benchmark of a server has."""
    parser.flag("--url", metavar="URL", help=f"the running server (default: {DEFAULT_URL})")
    parser.flag("--api-key", metavar="KEY", dest="api_key", help="the server's key (better: INGOT_API_KEY)")
    parser.flag("--output-tokens", "--max-tokens", metavar="N", help=f"answer length (default: {output_tokens})")
    parser.flag("--seed", metavar="N", help=f"seed of the prompts (default: {seed})")
    parser.flag("--timeout", metavar="N", help="seconds of silence after which a request fails (default: 600)")
    parser.flag("--json", metavar="FILE", type=Path, help="write all figures here")


def read_load_plan(flags: Mapping[str, Any]) -> LoadPlan:
    """The plan that the flags describe. Raises ConfigError."""
    defaults = LoadPlan()
    endpoint = flags.get("endpoint", defaults.endpoint)
    if endpoint not in ENDPOINT_PATHS:
        raise ConfigError(f"--endpoint: {endpoint!r} is not one of {', '.join(ENDPOINT_PATHS)}")
    levels = flags["concurrency"].split(",") if "concurrency" in flags else defaults.concurrency
    return LoadPlan(
        endpoint=endpoint,
        model=flags.get("name"),
        concurrency=tuple(parse_whole_number("--concurrency", part, 1, 4096) for part in levels),
        prompt_tokens=number_flag(flags, "prompt_tokens", defaults.prompt_tokens, low=1),
        output_tokens=number_flag(flags, "output_tokens", defaults.output_tokens, low=1),
        requests=number_flag(flags, "requests", 0, low=1) or None,
        warmup=number_flag(flags, "warmup", defaults.warmup, low=0),
        seed=number_flag(flags, "seed", defaults.seed, low=0),
    )


def _report_load_errors(levels: list[LoadLevel]) -> int:
    """Failed requests make a failed benchmark, each kind of failure named once."""
    for level in levels:
        for message, times in level.errors.items():
            print(f"ingot bench: {level.concurrency} streams: {times}x {message}", file=sys.stderr)
    return 1 if any(level.errors for level in levels) else 0


ENDPOINT_PATHS = {"chat": "chat/completions", "completions": "completions"}
REQUESTS_PER_STREAM = 4
PROBE_WORDS = 256
# Short and common, so that most tokenizers spend one token on each.
_PROMPT_WORDS_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office "
    "door health person art war history party result change morning reason research girl guy moment air teacher"
)
PROMPT_WORDS = _PROMPT_WORDS_TEXT.split()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    endpoint: str = "chat"
    model: str | None = None  # None: the one that the server lists first
    concurrency: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 128
    output_tokens: int = 64
    requests: int | None = None  # a level; None: REQUESTS_PER_STREAM for each of its streams
    warmup: int = 1  # requests before each level, not measured
    seed: int = 0

    def requests_at(self, concurrency: int) -> int:
        return REQUESTS_PER_STREAM * concurrency if self.requests is None else self.requests


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A probed server: what to call its model, whether it is ingot, how many words to send."""

    client: ServerClient
    model: str
    is_ingot: bool
    words: int


def prepare_target(client: ServerClient, plan: LoadPlan) -> LoadTarget:
    """Find the model's name and the prompts' length. Raises ServerError or ConfigError."""
    ingot = is_ingot_server(client)
    model = plan.model or ("default" if ingot else _first_model(client))
    target = LoadTarget(client, model, ingot, words=1)
    words = calibrate_words(plan.prompt_tokens, lambda words: _probe_tokens(target, plan, words))
    return replace(target, words=words)


def calibrate_words(wanted: int, count: Callable[[int], int]) -> int:
    """How many words make a prompt of `wanted` tokens, where `count` asks the server for a number of words."""
    many = max(2, min(wanted, PROBE_WORDS))
    few = many // 2
    most, least = count(many), count(few)
    per_word = max(most - least, 1) / (many - few)
    around = most - per_word * many
    words = round((wanted - around) / per_word)
    if words < 1:
        raise ConfigError(f"--prompt-tokens {wanted}: the shortest prompt is about {round(around + per_word)} tokens")
    return words


def run_level(target: LoadTarget, plan: LoadPlan, concurrency: int) -> LoadLevel:
    """Warm up, then keep `concurrency` requests under way until the level's number is done."""
    measure = partial(measure_request, target.client, ENDPOINT_PATHS[plan.endpoint])
    warmups = [request_body(target, plan, f"warm-up {concurrency}/{index}") for index in range(plan.warmup)]
    run_concurrently(measure, warmups, concurrency)
    total = plan.requests_at(concurrency)
    bodies = [request_body(target, plan, f"{concurrency}/{index}") for index in range(total)]
    return summarise_level(concurrency, run_concurrently(measure, bodies, concurrency))


def run_concurrently(
    send: Callable[[dict[str, Any]], T], bodies: Sequence[dict[str, Any]], concurrency: int
) -> list[T]:
    """Send requests, so many at once; their results, in order. Raises the first one's ServerError."""
    waiting: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for numbered in enumerate(bodies):
        waiting.put(numbered)
    done: queue.SimpleQueue[tuple[int, T | ServerError]] = queue.SimpleQueue()

    def stream() -> None:
        while True:
            try:
                number, body = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, send(body)))
            except ServerError as error:
                done.put((number, error))

    for _ in range(min(concurrency, len(bodies))):
        # Daemons: when the user interrupts, the program must not wait for answers that nobody wants.
        threading.Thread(target=stream, daemon=True).start()
    results = [result for _, result in sorted((done.get() for _ in bodies), key=itemgetter(0))]
    for result in results:
        if isinstance(result, ServerError):
            raise result
    return cast("list[T]", results)


def measure_request(client: ServerClient, path: str, body: Mapping[str, Any]) -> RequestSample:
    """One streamed request, timed from before it connects to its last byte."""
    started = time.perf_counter()
    arrivals: list[float] = []
    usage: Mapping[str, Any] = {}
    try:
        for chunk in client.stream(path, body):
            if any(chunk_delta(chunk.data)):
                arrivals.append(chunk.at)
            usage = chunk.data.get("usage") or usage
    except ServerError as error:
        return RequestSample(started, time.perf_counter(), tuple(arrivals), error=error.message)
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return RequestSample(started, time.perf_counter(), tuple(arrivals), prompt, completion)


def request_body(target: LoadTarget, plan: LoadPlan, name: str) -> dict[str, Any]:
    body = _question_body(target, plan, name, target.words)
    body |= {"max_tokens": plan.output_tokens, "stream": True, "stream_options": {"include_usage": True}}
    # Only ingot is known to honour it; another server's answer may be shorter, and the counts then show it.
    return body | ({"ignore_eos": True} if target.is_ingot else {})


def _question_body(target: LoadTarget, plan: LoadPlan, name: str, words: int) -> dict[str, Any]:
    dice = random.Random(f"{plan.seed}/{name}")
    text = " ".join(dice.choices(PROMPT_WORDS, k=words))
    prompt = {"prompt": text} if plan.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {"model": target.model, "temperature": 0, **prompt}


def _probe_tokens(target: LoadTarget, plan: LoadPlan, words: int) -> int:
    body = _question_body(target, plan, f"probe {words}", words) | {"max_tokens": 1}
    answer = target.client.post(ENDPOINT_PATHS[plan.endpoint], body)
    tokens = (answer.get("usage") or {}).get("prompt_tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, int):
        raise ServerError(f"{target.client.url} does not say how many tokens a prompt has (usage.prompt_tokens)")
    return tokens


def is_ingot_server(client: ServerClient) -> bool:
    try:
        return any(model.get("owned_by") == "ingot" for model in client.get("models")["data"])
    except (ServerError, KeyError, TypeError, AttributeError):
        return False


def _first_model(client: ServerClient) -> str:
    try:
        return str(client.get("models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{client.url} lists no models; name one with --model") from None


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request. Times are seconds on one clock; `arrivals` are those of the chunks with text."""

    started: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int | None = None  # as the server counted them
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def problem(self) -> str | None:
        return self.error or (None if self.arrivals else "the answer has no text")

    @property
    def tokens(self) -> int:
        """The server's own count, or the number of chunks where it gives none."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float:
        """After the first one; unlike a gap, right also where a chunk holds several tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.ended - self.started)


@dataclass(frozen=True, slots=True)
class LatencySpread:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """All the requests at one concurrency. A spread is None when nothing was measured."""

    concurrency: int
    requests: int
    seconds: float  # from the first request's start to the last one's end
    prompt_tokens: int
    output_tokens: int
    chunks: int
    counted_by: str  # what output_tokens rests on: usage, chunks, or (over several requests) both
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    ttft: LatencySpread | None
    inter_token: LatencySpread | None  # between the chunks of a stream
    seconds_per_token: LatencySpread | None  # one value a request
    request_seconds: LatencySpread | None
    request_tokens_per_second: LatencySpread | None
    errors: dict[str, int]  # message: how often

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted `values` lie, interpolated between neighbours."""
    rank = share * (len(values) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return values[low] + (values[high] - values[low]) * (rank - low)


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return LatencySpread(mean, quantile(ordered, 0.5), quantile(ordered, 0.9), quantile(ordered, 0.99), ordered[-1])


def summarise_level(concurrency: int, samples: Sequence[RequestSample]) -> LoadLevel:
    """Failed requests count as errors alone: their tokens and times are in no other figure."""
    good = [sample for sample in samples if sample.problem is None]
    errors = Counter(sample.problem for sample in samples if sample.problem is not None)
    seconds = max(s.ended for s in samples) - min(s.started for s in samples)
    output = sum(sample.tokens for sample in good)
    prompt = sum(sample.prompt_tokens or 0 for sample in good)
    counts = {"chunks" if sample.completion_tokens is None else "usage" for sample in good}
    return LoadLevel(
        concurrency=concurrency,
        requests=len(samples),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        chunks=sum(len(sample.arrivals) for sample in good),
        counted_by=" and ".join(sorted(counts)),
        output_tokens_per_second=output / seconds,
        prompt_tokens_per_second=prompt / seconds,
        requests_per_second=len(good) / seconds,
        ttft=spread_of([sample.ttft for sample in good]),
        inter_token=spread_of([gap for sample in good for gap in sample.gaps]),
        seconds_per_token=spread_of([sample.seconds_per_token for sample in good if sample.tokens > 1]),
        request_seconds=spread_of([sample.ended - sample.started for sample in good]),
        request_tokens_per_second=spread_of([sample.tokens_per_second for sample in good]),
        errors=dict(errors),
    )


TABLE_HEAD = ("streams", "done", "failed", "prompt", "output", "tok/s", "tok/s each")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
SPREAD_HEAD = ("TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms")


def load_table_head() -> str:
    return _table_cells([*TABLE_HEAD, *SPREAD_HEAD])


def load_table_row(level: LoadLevel) -> str:
    good = level.requests - level.failed
    each = level.request_tokens_per_second
    cells = [
        str(level.concurrency),
        str(good),
        str(level.failed),
        f"{level.prompt_tokens / good:.0f}" if good else "-",
        f"{level.output_tokens / good:.0f}" if good else "-",
        f"{level.output_tokens_per_second:.1f}",
        f"{each.mean:.1f}" if each else "-",
    ]
    return _table_cells([*cells, *_spread_milliseconds(level.ttft), *_spread_milliseconds(level.inter_token)])


def _spread_milliseconds(spread: LatencySpread | None) -> list[str]:
    return ["-"] * 3 if spread is None else [f"{value * 1e3:.1f}" for value in (spread.p50, spread.p90, spread.p99)]


def _table_cells(cells: Sequence[str]) -> str:
    return "  ".join(
        f"{cell:>{max(7, len(head))}}" for cell, head in zip(cells, (*TABLE_HEAD, *SPREAD_HEAD), strict=True)
    )


def load_report(target: LoadTarget, plan: LoadPlan, levels: Sequence[LoadLevel]) -> dict[str, Any]:
    """Times are in seconds."""
    server = {"url": target.client.url, "model": target.model, "is_ingot": target.is_ingot}
    return {
        "ingot": __version__,
        "server": server,
        "plan": asdict(plan) | {"words_per_prompt": target.words},
        "levels": [asdict(level) | {"failed": level.failed} for level in levels],
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def require_plotting(path: Path) -> None:
    """Raise before anything is measured, rather than after, when nothing can be plotted."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot: {path} must end in {', '.join(PLOT_SUFFIXES)}")
    require_extra("bench", "--plot")


def write_load_plot(path: Path, target: LoadTarget, plan: LoadPlan, levels: Sequence[LoadLevel]) -> None:
    figure, grid = plots.panels(1, 3)
    left, middle, right = grid[0]
    streams = [level.concurrency for level in levels]
    left.plot(streams, [level.output_tokens_per_second for level in levels], marker="o")
    left.set(title="throughput", ylabel="output tokens per second")
    _plot_spread(middle, "time to first token", [(level.concurrency, level.ttft) for level in levels])
    _plot_spread(right, "time between tokens", [(level.concurrency, level.inter_token) for level in levels])
    for axes in (left, middle, right):
        axes.set(xlabel="streams at once", xticks=streams)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{target.model}, {counted(plan.prompt_tokens, 'token')} in, {plan.output_tokens} out, {plan.endpoint}"
    )
    plots.save(figure, path)


def _plot_spread(axes: Any, title: str, points: Sequence[tuple[int, LatencySpread | None]]) -> None:
    measured = [(streams, spread) for streams, spread in points if spread is not None]
    for name in ("p50", "p90", "p99"):
        values = [asdict(spread)[name] * 1e3 for _, spread in measured]
        axes.plot([streams for streams, _ in measured], values, marker="o", label=name)
    axes.set(title=title, ylabel="milliseconds")
    axes.legend()

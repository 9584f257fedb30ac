"""Puts a measured load on an OpenAI-compatible server: so many streams at once, each prompt its own.

Prompts are random words from a seed. They differ from the first word on, so that a prefix cache has nothing to
offer, and their length is calibrated by the server's own count of a probe's tokens.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.cli.bench_stats import Level, Sample, summarise
from ingot.cli.client import Client, ServerError, delta_of
from ingot.errors import ConfigError

PATHS = {"chat": "chat/completions", "completions": "completions"}
REQUESTS_PER_STREAM = 4
PROBE_WORDS = 256
# Short and common, so that most tokenizers spend one token on each.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office "
    "door health person art war history party result change morning reason research girl guy moment air teacher"
)
WORDS = _WORDS.split()


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
class Target:
    """A server that was looked at: what to call its model, whether it is ingot, how many words to send."""

    client: Client
    model: str
    is_ingot: bool
    words: int


def prepare(client: Client, plan: LoadPlan) -> Target:
    """Find the model's name and the prompts' length. Raises ServerError or ConfigError."""
    ingot = is_ingot(client)
    model = plan.model or ("default" if ingot else _first_model(client))
    target = Target(client, model, ingot, words=1)
    return Target(client, model, ingot, calibrate(plan.prompt_tokens, lambda words: _probe(target, plan, words)))


def calibrate(wanted: int, count: Callable[[int], int]) -> int:
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


def run_level(target: Target, plan: LoadPlan, concurrency: int) -> Level:
    """Warm up, then keep `concurrency` requests under way until the level's number is done."""
    warmups = [request_body(target, plan, f"warm-up {concurrency}/{index}") for index in range(plan.warmup)]
    _drive(target, plan, warmups, concurrency)
    total = plan.requests_at(concurrency)
    bodies = [request_body(target, plan, f"{concurrency}/{index}") for index in range(total)]
    return summarise(concurrency, _drive(target, plan, bodies, concurrency))


def _drive(target: Target, plan: LoadPlan, bodies: list[dict[str, Any]], concurrency: int) -> list[Sample]:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for body in bodies:
        waiting.put(body)
    done: queue.SimpleQueue[Sample] = queue.SimpleQueue()

    def stream() -> None:
        for body in _drain(waiting):
            done.put(measure(target.client, PATHS[plan.endpoint], body))

    # Daemons: when the user interrupts, the program must not wait for answers that nobody wants.
    threads = [threading.Thread(target=stream, daemon=True) for _ in range(min(concurrency, len(bodies)))]
    for thread in threads:
        thread.start()
    return [done.get() for _ in bodies]


def _drain(waiting: queue.SimpleQueue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def measure(client: Client, path: str, body: Mapping[str, Any]) -> Sample:
    """One streamed request, timed from before it connects to its last byte."""
    started = time.perf_counter()
    arrivals: list[float] = []
    usage: Mapping[str, Any] = {}
    try:
        for chunk in client.stream(path, body):
            if any(delta_of(chunk.data)):
                arrivals.append(chunk.at)
            usage = chunk.data.get("usage") or usage
    except ServerError as error:
        return Sample(started, time.perf_counter(), tuple(arrivals), error=error.message)
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Sample(started, time.perf_counter(), tuple(arrivals), prompt, completion)


def request_body(target: Target, plan: LoadPlan, name: str) -> dict[str, Any]:
    body = _question(target, plan, name, target.words)
    body |= {"max_tokens": plan.output_tokens, "stream": True, "stream_options": {"include_usage": True}}
    # Only ingot is known to honour it; another server's answer may be shorter, and the counts then show it.
    return body | ({"ignore_eos": True} if target.is_ingot else {})


def _question(target: Target, plan: LoadPlan, name: str, words: int) -> dict[str, Any]:
    dice = random.Random(f"{plan.seed}/{name}")
    text = " ".join(dice.choices(WORDS, k=words))
    asked = {"prompt": text} if plan.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {"model": target.model, "temperature": 0, **asked}


def _probe(target: Target, plan: LoadPlan, words: int) -> int:
    body = _question(target, plan, f"probe {words}", words) | {"max_tokens": 1}
    answer = target.client.post(PATHS[plan.endpoint], body)
    tokens = (answer.get("usage") or {}).get("prompt_tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, int):
        raise ServerError(f"{target.client.url} does not say how many tokens a prompt has (usage.prompt_tokens)")
    return tokens


def is_ingot(client: Client) -> bool:
    try:
        return any(model.get("owned_by") == "ingot" for model in client.get("models")["data"])
    except (ServerError, KeyError, TypeError, AttributeError):
        return False


def _first_model(client: Client) -> str:
    try:
        return str(client.get("models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{client.url} lists no models; name one with --model") from None

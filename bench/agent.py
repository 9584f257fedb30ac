"""An agent's session, turn by turn: how much of each prompt the server reuses, and what that saves.

python -m bench.agent                          the packaged model to 7,000 tokens, small random ones to 16,000
python -m bench.agent --models hybrid --turns 8 --tokens 3000 --cold 0
python -m bench.agent --vllm-mlx /path/to/venv/bin/vllm-mlx --json figures.json

Every server is sent the same session, with its own answers in it, one turn after another. `possible` is what the server
had computed by the end of the turn before. Some turns are then sent to ingot again without the cache: the cold time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import agent_models, servers
from bench.agent_session import Message, Session
from bench.serve import surroundings, words
from ingot.errors import IngotError
from ingot.models.files.progress import TerminalProgress

MODELS = ("default", *agent_models.CONFIGS)
TOKENS = {"default": 7000}
LONG_TOKENS = 16_500
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request cost. `possible` tokens of its prompt had been computed before."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the server does not say
    possible: int
    seconds: float
    reason: str | None = None

    @property
    def share(self) -> float | None:
        """Of what was possible."""
        if self.cached_tokens is None:
            return None
        return min(self.cached_tokens, self.possible) / self.possible if self.possible else 1.0


@dataclass
class Replay:
    """A session on one server: its turns, and the conversation that came of it."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    messages: list[list[Message]] = field(default_factory=list)  # as sent, turn by turn

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def share(self) -> float | None:
        """Of all that was possible over the session."""
        shares = [turn.share for turn in self.turns]
        if None in shares:
            return None
        possible = sum(turn.possible for turn in self.turns)
        taken = sum((share or 0.0) * turn.possible for share, turn in zip(shares, self.turns, strict=True))
        return taken / max(1, possible)


@dataclass(frozen=True, slots=True)
class Course:
    turns: int
    tokens: int  # that the last prompt has, about

    def characters(self, replay: Replay, sent: int) -> int:
        """How much the client says next, so that the session ends as long as it should; `sent` are characters."""
        last = replay.turns[-1]
        left = max(1, self.turns - len(replay.turns))
        a_token = sent / last.prompt_tokens
        return max(40, int((self.tokens - last.prompt_tokens) / left * a_token) - 250)


def ask(server: servers.Running, messages: list[Message], **more: Any) -> tuple[Any, float]:
    body = {"model": server.model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, **more}
    began = time.perf_counter()
    return server.client.post("chat/completions", body), time.perf_counter() - began


def measured(answer: Any, seconds: float, before: Turn | None) -> Turn:
    usage = answer["usage"]
    possible = 0 if before is None else before.prompt_tokens + before.completion_tokens - 1
    details = usage.get("prompt_tokens_details") or {}
    cache = (answer.get("ingot") or {}).get("cache") or {}
    return Turn(
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens"),
        min(possible, usage["prompt_tokens"] - 1),
        seconds,
        cache.get("reason"),
    )


class Player:
    """Plays a session on one server, a turn at a time. With `forced`, the model makes its calls itself."""

    def __init__(self, name: str, server: servers.Running, session: Session, course: Course, *, forced: bool) -> None:
        self.replay = Replay(name)
        self._server, self._session, self._course, self._forced = server, session, course, forced
        self._messages = session.opening()

    def step(self) -> None:
        turn = len(self.replay.turns)
        self.replay.messages.append(list(self._messages))
        answer, seconds = ask(self._server, self._messages, **self._session.body, **self._choice(turn))
        self.replay.turns.append(measured(answer, seconds, self.replay.turns[-1] if turn else None))
        sent = len(json.dumps(self._session.body)) + sum(len(json.dumps(message)) for message in self._messages)
        text = self._session.tell(turn, self._course.characters(self.replay, sent))
        self._messages += self._session.following(turn, _echo(answer), text)

    def _choice(self, turn: int) -> dict[str, Any]:
        if not self._forced:
            return {}
        listed = self._session.body["tools"]
        name = listed[turn % len(listed)]["function"]["name"]
        return {"tool_choice": {"type": "function", "function": {"name": name}}, "max_tokens": 400}


def _echo(answer: Any) -> Message:
    """The answer as clients send it back."""
    message = answer["choices"][0]["message"]
    kept: Message = {"role": "assistant", "content": message.get("content") or ""}
    return kept | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def cold(server: servers.Running, warm: Replay, session: Session, count: int) -> dict[int, float]:
    """Seconds of some turns, the last of them the session's last, with nothing to take over."""
    turns = len(warm.messages)
    count = min(count, turns)
    chosen = sorted(turns - 1 - turns * number // count for number in range(count))
    return {turn: ask(server, warm.messages[turn], cache="off", **session.body)[1] for turn in chosen}


@contextmanager
def started(folder: Path, chosen: argparse.Namespace) -> Iterator[list[servers.Running]]:
    with ExitStack() as stack:
        logs = folder.parent
        running = [stack.enter_context(servers.ingot(folder, logs / "ingot.log", 1, own_kernels=True))]
        if "mlx_lm" in chosen.servers:
            running.append(stack.enter_context(servers.mlx_lm(folder, logs / "mlx_lm.log", 1)))
        if chosen.vllm_mlx is not None:
            running.append(stack.enter_context(servers.vllm_mlx(chosen.vllm_mlx, folder, logs / "vllm_mlx.log")))
        yield running


def run(model: str, chosen: argparse.Namespace) -> list[Replay]:
    course = Course(chosen.turns, chosen.tokens or TOKENS.get(model, LONG_TOKENS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        agent_models.write(model, folder, TerminalProgress())
        session = Session(agent_models.knows_tools(folder))
        with started(folder, chosen) as running:
            replays = played([Player(each.name, each, session, course, forced=False) for each in running], course)
            apart = cold(running[0], replays[0], session, chosen.cold)
            if session.native and chosen.own_calls:
                own = Player("ingot, own calls", running[0], Session(True, seed=1), course, forced=True)
                replays += played([own], course)
    show(model, replays)
    show_cold(replays[0], apart)
    return replays


def played(players: Sequence[Player], course: Course) -> list[Replay]:
    """Turn by turn; who goes first changes with each. The first player's first turn settles what the client says."""
    for turn in range(course.turns):
        for player in players if turn % 2 == 0 else players[::-1]:
            player.step()
        print(f"  turn {turn + 1} of {course.turns}: done", file=sys.stderr, flush=True)
    return [player.replay for player in players]


def show(model: str, replays: Sequence[Replay]) -> None:
    first = replays[0]
    print(f"\n{model}: {len(first.turns)} turns, up to {first.turns[-1].prompt_tokens} tokens")
    print(f"{'turn':>4} {'tokens':>7} {'possible':>9} " + " ".join(f"{replay.name:>24}" for replay in replays))
    for number, turn in enumerate(first.turns):
        cells = " ".join(_cell(replay.turns[number]) for replay in replays)
        print(f"{number + 1:>4} {turn.prompt_tokens:>7} {turn.possible:>9} {cells}")
    for replay in replays:
        share = "unknown" if replay.share is None else f"{replay.share:.1%}"
        least = min((turn.share for turn in replay.turns if turn.share is not None), default=0.0)
        ratio = f"{replay.seconds / first.seconds:.2f}x of ingot's time" if replay is not first else ""
        print(f"{replay.name:>24}: {share} of what was possible (least {least:.1%}), {replay.seconds:.1f} s {ratio}")


def show_cold(warm: Replay, cold: dict[int, float]) -> None:
    if not cold:
        return
    seconds, kept = sum(cold.values()), sum(warm.turns[turn].seconds for turn in cold)
    named = ", ".join(str(turn + 1) for turn in cold)
    print(f"without the cache, turns {named}: {seconds:.1f} s, instead of {kept:.1f} s: {seconds / kept:.1f}x")


def _cell(turn: Turn) -> str:
    share = "      -" if turn.share is None else f"{turn.share:>7.1%}"
    return f"{share} {turn.seconds * 1e3:>7.0f} ms {(turn.reason or '')[:4]:>5}"


def read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.agent", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = ", ".join(MODELS)
    parser.add_argument("--models", type=words(MODELS), default=("default", "hybrid", "window"), help=f"of {known}")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, help=f"of the last prompt (default: 7000 or {LONG_TOKENS})")
    parser.add_argument("--servers", type=words(("mlx_lm", "none")), default=("mlx_lm",), help="to compare with")
    parser.add_argument("--vllm-mlx", type=Path, help="the program vllm-mlx, in an environment of its own")
    parser.add_argument("--cold", type=int, default=3, help="turns to repeat without the cache (default: 3)")
    parser.add_argument(
        "--own-calls",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also with calls that the model makes itself",
    )
    parser.add_argument("--json", type=Path, help="write every turn's figures here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = read(sys.argv[1:] if arguments is None else arguments)
    around = surroundings()
    try:
        found = {model: run(model, chosen) for model in chosen.models}
    except IngotError as error:
        print(f"bench.agent: {error.message}", file=sys.stderr)
        return 1
    if chosen.json:
        listed = {
            model: {replay.name: [asdict(turn) for turn in replay.turns] for replay in replays}
            for model, replays in found.items()
        }
        chosen.json.write_text(json.dumps({"surroundings": around, "sessions": listed}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`ingot bench peers [MODEL]`: ingot beside other servers, on this machine and this model, with the work of an agent.

Each peer is compared by itself: ingot and it are started on the same weights, take turns at the same work, and are
stopped. This process only measures: it does without MLX.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ingot.cli.bench import calibrate_words
from ingot.cli.client import ServerError
from ingot.cli.flags import (
    MODEL_FILE_SETTINGS,
    CommandParser,
    add_settings,
    number_flag,
    parse_whole_number,
    settings_from_arguments,
)
from ingot.cli.peers import table
from ingot.cli.peers.comparison import Match, Trouble, do_work, wins
from ingot.cli.peers.models import Forms, prepare
from ingot.cli.peers.processes import Placement, Server
from ingot.cli.peers.report import Contender, Report, terminal_head, terminal_lines
from ingot.cli.peers.session import Session, prose
from ingot.cli.peers.table import OURS, PEER_NAMES, Peer, find_peer
from ingot.cli.peers.works import WORK_NAMES, WORKS, Load, Work
from ingot.config import DEFAULT_MODEL
from ingot.errors import ConfigError, IngotError
from ingot.extras import extras_command, missing_packages
from ingot.models.files.progress import TerminalProgress

ABOUT: Final = (
    "Compare ingot with other servers on this machine, on the same weights, turn by turn in one run. Peers: "
    f"{', '.join(PEER_NAMES)}; those that are found here take part. Two servers run at a time, so there must be "
    "memory for both."
)
LONG_TOKENS: Final = 87_000
MOST_TOOLS: Final = 0.6
"""Of a session's last prompt, what its tools may take."""
EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception): ")
"""A line of a log that names one."""
COUNTED: Final = {"max_tokens": 1, "cache": "off"}
"""Of requests that ask ingot how long a prompt is. Nothing of it may be known to it, and unknown to its peer, later."""
PROBE_CHARACTERS: Final = (500, 1500)
"""Of two texts, whose difference says how long a token is."""


@dataclass(frozen=True)
class Chosen:
    peers: tuple[str, ...]
    works: tuple[Work, ...]
    flags: Mapping[str, tuple[str, ...]]
    timeout: float
    load_of: Callable[[Forms], Load]


def run_bench_peers(arguments: list[str]) -> int:
    namespace = _parser().parse(arguments)
    flags = vars(namespace)
    settings = settings_from_arguments(namespace).settings
    chosen = read_choice(flags)
    model = flags.get("model") or DEFAULT_MODEL
    progress = TerminalProgress()
    present, absent = _find(chosen, progress, install="install" in flags)
    with _ending_with_its_servers(), tempfile.TemporaryDirectory(prefix="ingot-peers-") as scratch:
        forms = prepare(model, flags.get("gguf"), [peer for peer, _ in present], Path(scratch) / "forms", settings)
        load = chosen.load_of(forms)
        report = Report(forms.name, arguments, load, [], [], list(forms.notes), absent)
        try:
            for peer, program in present:
                _compare_with(peer, program, forms, load, chosen, Path(scratch), report)
        finally:  # also of a run that was interrupted
            _note_unmeasured(report, [peer.name for peer, _ in present])
            _publish(report, flags.get("report"))
    return 0 if report.matches else 1


@contextmanager
def _ending_with_its_servers() -> Iterator[None]:
    """A process that is told to end leaves its `with` blocks, and so stops the servers that it started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _note_unmeasured(report: Report, peers: Sequence[str]) -> None:
    """Peers whose turn did not come, or was over before it gave a figure, because the run was interrupted."""
    report.matches[:] = [match for match in report.matches if match.figures]
    told = {match.peer for match in report.matches} | {name for name, _ in report.absent}
    report.absent += [(name, "the run was interrupted before its turn") for name in peers if name not in told]


def _publish(report: Report, folder: Path | None) -> None:
    if report.matches:
        print(f"\n{wins(report.matches)}")
    if folder is not None:
        written = report.write(folder)
        print(f"the report is in {folder}: {', '.join(path.name for path in written)}")
        if missing_packages("bench"):
            print(f"plots need `{extras_command('bench')}`")


def _parser() -> CommandParser:
    parser = CommandParser("bench peers", ABOUT)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"a model that ingot serves (default: {DEFAULT_MODEL})"
    )
    parser.flag("--peers", metavar="NAME,...", help="only these (default: all that are found)")
    parser.flag(
        "--install",
        action="store_true",
        help=f"install those that are missing into environments of their own, below {table.PEERS_FOLDER}",
    )
    parser.flag("--gguf", metavar="FILE", type=Path, help="the same weights for servers that load GGUF files alone")
    kinds = "; ".join(f"{work.name}: {work.about}" for work in WORKS)
    parser.flag("--work", metavar="NAME,...", help=f"only these (default: all). {kinds}")
    parser.flag("--quick", action="store_true", help="less of everything, to see that it works")
    parser.flag("--long", action="store_true", help=f"the agent's session ends at {LONG_TOKENS} tokens")
    parser.flag("--rounds", metavar="N", help=f"of all work but sessions and memory (default: {Load.rounds})")
    parser.flag("--streams", metavar="N,N", help=f"at once (default: {','.join(map(str, Load.streams))})")
    parser.flag(
        "--flags",
        metavar="NAME='--a 1'",
        action="append",
        help="more flags for the server of that name, or for ingot; may be repeated",
    )
    parser.flag("--report", metavar="FOLDER", type=Path, help="write report.md, report.json and plots here")
    parser.flag("--timeout", metavar="N", help="seconds of silence after which a request fails (default: 600)")
    add_settings(parser, (), names=MODEL_FILE_SETTINGS)
    return parser


def read_choice(flags: Mapping[str, Any]) -> Chosen:
    """What the flags ask for. Raises ConfigError, also for what would fail only once all is measured."""
    if "quick" in flags and "long" in flags:
        raise ConfigError("--quick and --long exclude each other: give one of them")
    if (gguf := flags.get("gguf")) is not None and not gguf.is_file():
        raise ConfigError(f"--gguf: there is no file {gguf}")
    if (report := flags.get("report")) is not None:
        _check_writable(report.absolute())
    works = _listed("--work", flags["work"], WORK_NAMES) if "work" in flags else WORK_NAMES
    rounds = number_flag(flags, "rounds", 1 if "quick" in flags else Load.rounds, low=1)
    streams = flags.get("streams")
    levels = Load.streams
    if streams is not None:
        levels = tuple(parse_whole_number("--streams", part, 1, 4096) for part in streams.split(","))

    def load_of(forms: Forms) -> Load:
        load = Load(forms.traits, rounds=rounds, streams=levels)
        if "long" in flags:
            load = replace(load, session_tokens=LONG_TOKENS)
        if "quick" in flags:
            fewer = levels if streams is not None else levels[:2]
            load = replace(load, streams=fewer, turns=4, opening=1000, session_tokens=2500, long_prompt=1000)
            load = replace(load, prompt_tokens=64, output_tokens=16, questions=2, answers=2)
        return load

    return Chosen(
        _listed("--peers", flags["peers"], (*PEER_NAMES, OURS)) if "peers" in flags else PEER_NAMES,
        tuple(work for work in WORKS if work.name in works),
        _more_flags(flags.get("flags") or []),
        float(number_flag(flags, "timeout", 600, low=1)),
        load_of,
    )


def _listed(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return names


def _check_writable(folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"--report: {there} is no folder that can be written to")


def _more_flags(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, more = text.partition("=")
        if not equals:
            raise ConfigError(f"--flags: {text!r} is not NAME='FLAGS'")
        _listed("--flags", name, (OURS, *PEER_NAMES))
        try:
            found[name] = (*found.get(name, ()), *shlex.split(more))
        except ValueError as error:
            raise ConfigError(f"--flags: {text!r}: {error}") from None
    return found


def _find(
    chosen: Chosen, progress: TerminalProgress, *, install: bool
) -> tuple[list[tuple[Peer, Path]], list[tuple[str, str]]]:
    """The peers that can take part, and why others cannot."""
    present: list[tuple[Peer, Path]] = []
    absent: list[tuple[str, str]] = []
    for name in chosen.peers:
        peer = find_peer(name)
        program = table.find_program(peer)
        why = table.absence(peer)
        if program is None and install and table.can_install(peer):
            try:
                table.install(peer, progress)
            except IngotError as error:
                why = error.message
            progress.finish()
            program = table.find_program(peer)
        if program is None:
            absent.append((name, why))
            print(f"{name}: {why}")
        else:
            present.append((peer, program))
    if not present:
        raise ConfigError("none of these servers is here")
    return present, absent


def _compare_with(
    peer: Peer, program: Path, forms: Forms, load: Load, chosen: Chosen, scratch: Path, report: Report
) -> None:
    """With answers that end, and with those that do not, each on servers of their own."""
    match = Match(peer.name)
    report.matches.append(match)
    version = table.version_of(peer, program)
    print(f"\n{terminal_head(match)} {version}", flush=True)
    for endless in (True, False):
        works = [work for work in chosen.works if work.endless is endless]
        if not works:
            continue
        try:
            sides = [
                _server(each, where, forms, load, chosen, scratch / f"{peer.name}-{endless}-{number}", endless=endless)
                for number, (each, where) in enumerate(((find_peer(OURS), _ours()), (peer, program)))
            ]
            with sides[0] as ours, sides[1] as theirs:
                _note_contenders(report, (ours, theirs), version)
                ready = _calibrated(load, ours, forms)
                for work in works:
                    do_work((ours, theirs), work, ready, match)
                    print("\n".join(terminal_lines(match, work.name)), flush=True)
        except (ServerError, ConfigError) as error:
            match.troubles.append(Trouble(peer.name, works[0].name, "did not run", short_reason(error.message)))
            print(f"  {match.troubles[-1]}", flush=True)
            break
    if not match.figures:
        report.matches.remove(match)
        report.absent.append((peer.name, f"{version}: {match.troubles[-1].why}"))


def _ours() -> Path:
    program = table.find_program(find_peer(OURS))
    assert program is not None
    return program


def _server(
    peer: Peer, program: Path, forms: Forms, load: Load, chosen: Chosen, scratch: Path, *, endless: bool
) -> Server:
    weights = forms.of(peer, endless=endless)
    more = chosen.flags.get(peer.name, ())
    server = Server(
        peer, program, Placement(weights, forms.name, load.most_streams, load.traits.context, scratch, more)
    )
    server.client.timeout = chosen.timeout
    return server


def _note_contenders(report: Report, servers: Sequence[Server], version: str) -> None:
    known = {each.name for each in report.contenders}
    for server in servers:
        if server.name not in known:
            said = table.version_of(server.peer, server.program) if server.name == OURS else version
            report.contenders.append(Contender(server.name, said, server.shown))
            known.add(server.name)


def _calibrated(load: Load, server: Server, forms: Forms) -> Load:
    """How long this model's tokens are, by what the server counts; and a session of its own for the pair."""

    def count(text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}], **COUNTED}
        answer = server.client.post("chat/completions", server.ask(body))
        return int(answer["usage"]["prompt_tokens"])

    words = calibrate_words(load.prompt_tokens, lambda words: count(" ".join(["time"] * words)))
    few, many = (prose(random.Random(0), characters) for characters in PROBE_CHARACTERS)
    characters = (len(many) - len(few)) / max(1, count(many) - count(few))
    sized = replace(load, words=words, characters=characters)
    return replace(sized, session=_fitting_session(sized, server, Session(forms.traits.tools)))


def _fitting_session(load: Load, server: Server, session: Session) -> Session:
    """Its instructions are as long as the load wants them, or have fewer tools where the context is short."""
    body = {"messages": session.opening(), **COUNTED, **session.body}
    try:
        tokens = int(server.client.post("chat/completions", server.ask(body))["usage"]["prompt_tokens"])
    except ServerError:  # more than the context holds
        tokens = load.traits.context
    most = int(MOST_TOOLS * load.course.tokens)
    if tokens > most:
        return replace(session, tools=max(2, session.tools * most // tokens))
    return replace(session, padding=max(0, int((load.course.opening - tokens) * load.characters)))


def short_reason(text: str) -> str:
    """The first line, and of what follows, a server's log, the last exception; or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines[1:] if EXCEPTION.match(line)]
    return " ".join([*lines[:1], *(raised or lines[1:])[-1:]])[:400]

"""`python -m tools.harvest` compares how ingot reads answers and renders prompts with how its peers do.

It takes the newest releases of other servers from the package index, runs their own parser tests in an environment of
their own while a recorder notes which text gave which calls, and replays the texts here: whole, character by
character, and in random splits. Chat templates that the packages hold are rendered here and by transformers. What
differs goes into a report, for somebody to judge: a peer may be wrong, and nothing of theirs enters this project.

This file is also the recorder: pytest imports it as a plugin within the peer's environment, so its head needs nothing
but the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = ("mlx-lm", "vllm-mlx", "rapid-mlx")
"""Peers whose sources hold tests of parsers."""
TEMPLATE_PACKAGES = ("mlx-lm", "vllm-mlx", "rapid-mlx", "mlx-vlm", "vllm", "sglang")
RECORDS = "HARVEST_RECORDS"
SPLITS = 3

FORMATS: Mapping[str, tuple[str, ...]] = {
    "deepseek": ("deepseek-v3",),
    "deepseekv3": ("deepseek-v3",),
    "deepseekv31": ("deepseek-v3.1",),
    "deepseekv4": ("deepseek-v4",),
    "deepseekv40731": ("deepseek-v4.1", "deepseek-v4"),
    "functiongemma": ("function-gemma",),
    "functionary": ("functionary-3.2", "functionary"),
    "gemma4": ("gemma4",),
    "glm47": ("glm",),
    "granite": ("granite",),
    "harmony": ("harmony",),
    "hermes": ("hermes", "qwen3-coder"),
    "hyv3": ("hunyuan-v3-opensource", "hunyuan-v3"),
    "jsontools": ("hermes",),
    "k2horizon": ("k2-horizon",),
    "kimi": ("kimi-k2",),
    "kimik2": ("kimi-k2",),
    "kimik3": ("kimi-k3",),
    "lfm": ("lfm2",),
    "llama": ("llama", "pythonic"),
    "longcat": ("longcat",),
    "minicpm": ("minicpm5",),
    "minicpm5": ("minicpm5",),
    "minimax": ("minimax-m2",),
    "minimaxm2": ("minimax-m2",),
    "mistral": ("mistral", "mistral-args"),
    "muse": ("muse",),
    "nemotron": ("nemotron-nano-v2", "qwen3-coder"),
    "pythonic": ("pythonic",),
    "qwen": ("qwen", "qwen3-coder"),
    "qwen3coder": ("qwen3-coder",),
    "qwen3xml": ("qwen3-coder",),
    "seedoss": ("seed-oss",),
    "step3p5": ("step3", "qwen3-coder"),
    "uitars": ("ui-tars",),
    "xlam": ("xlam",),
}
"""The formats of ours that read what a peer's parser reads, by its name without `ToolParser`, `_` and case."""


# Within a peer's environment


def record(method: Callable[..., Any], parser: str, wrap: tuple[str, str] = ("", "")) -> Callable[..., Any]:
    """The same method, which notes each text that it is given and what it made of it."""

    @functools.wraps(method)
    def recorded(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        bound = inspect.signature(method).bind(*arguments, **named).arguments
        text = next((value for key, value in bound.items() if key != "self" and isinstance(value, str)), None)
        request = bound.get("request") or {"tools": bound.get("tools")}
        if text is not None:
            note = {
                "parser": parser,
                "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
                "text": wrap[0] + text + wrap[1],
                "tools": plain(request.get("tools") if isinstance(request, dict) else getattr(request, "tools", None)),
                **recorded_result(result),
            }
            with Path(os.environ[RECORDS]).open("a") as file:
                file.write(json.dumps(note, default=str) + "\n")
        return result

    return recorded


def plain(tools: Any) -> Any:
    return [tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools or ()]


def recorded_result(result: Any) -> dict[str, Any]:
    """What servers' parsers return, or mlx-lm's functions: one call or a list of them."""
    if hasattr(result, "tool_calls"):
        return {"calls": result.tool_calls, "content": result.content}
    return {"calls": result if isinstance(result, list) else [result], "content": None}


def pytest_collection_finish(session: Any) -> None:
    """Wraps every parser that the collected tests have imported."""
    for name, module in list(sys.modules.items()):
        if ".tool_parsers" not in name or module is None:
            continue
        if (parse := getattr(module, "parse_tool_call", None)) is not None:
            tags = (getattr(module, "tool_call_start", ""), getattr(module, "tool_call_end", ""))
            module.parse_tool_call = record(parse, name.rpartition(".")[2], tags)
        for found in list(vars(module).values()):
            if isinstance(found, type) and found.__module__ == name and "extract_tool_calls" in vars(found):
                found.extract_tool_calls = record(found.extract_tool_calls, found.__name__)  # type: ignore[attr-defined]


# Here


def run_quietly(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False, **options)


def download(package: str, folder: Path) -> Path | None:
    """The newest release's sources, or its wheel where there are none; None where the index has neither."""
    target = folder / package
    if target.exists():
        return target
    fetched = folder / f"{package}.download"
    for which in (("--no-binary", ":all:"), ("--only-binary", ":all:")):
        shutil.rmtree(fetched, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *which, "--dest", fetched, package)
        if run_quietly(*pip).returncode == 0:
            break
    for archive in fetched.glob("*") if fetched.exists() else ():
        if archive.suffix == ".gz":
            with tarfile.open(archive) as sources:
                sources.extractall(target, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target)
        (target / "RELEASE").write_text(archive.name)
        return target
    return None


def prepare_environment(sources: Path) -> Path:
    """An environment with the peer, as its users have it, and pytest."""
    python = sources / ".venv/bin/python"
    if not python.exists():
        run_quietly(sys.executable, "-m", "venv", sources / ".venv")
        project = next(path.parent for path in sorted(sources.glob("*/pyproject.toml")))
        mlx = ["mlx[cpu]"] if sys.platform == "linux" else []
        done = run_quietly(python, "-m", "pip", "install", "--quiet", project, *mlx, "pytest", "pytest-asyncio")
        if done.returncode != 0:
            shutil.rmtree(sources / ".venv")
            raise RuntimeError(f"{sources.name} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def record_parser_tests(sources: Path) -> list[dict[str, Any]]:
    """What the peer's own tests of parsers gave its parsers, and what these made of it."""
    python, records = prepare_environment(sources), sources / "records.jsonl"
    shutil.copy(__file__, sources / "harvest_recorder.py")
    records.unlink(missing_ok=True)
    project = next(path.parent for path in sorted(sources.glob("*/pyproject.toml")))
    tests = [path for path in sorted(project.glob("tests/**/test_*.py")) if re.search(r"tool_?(pars|call)", path.stem)]
    environment = {**os.environ, "PYTHONPATH": str(sources), RECORDS: str(records)}
    done = run_quietly(
        *(
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "harvest_recorder",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            *tests,
        ),
        cwd=project,
        env=environment,
        timeout=1800,
    )
    if done.returncode > 1:
        print(f"{sources.name}: not all tests ran: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
    notes = records.read_text().splitlines() if records.exists() else []
    return [json.loads(note) for note in dict.fromkeys(notes)]


@dataclass(frozen=True)
class Answer:
    """What was read: the calls with their arguments, and the text around them."""

    calls: tuple[tuple[str, str], ...]
    content: str


def their_answer(note: Mapping[str, Any]) -> Answer:
    calls = []
    for call in note["calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            with contextlib.suppress(json.JSONDecodeError):
                arguments = json.loads(arguments or "{}")
        calls.append((str(function.get("name")), json.dumps(arguments, sort_keys=True, ensure_ascii=False)))
    return Answer(tuple(calls), (note["content"] or "").strip())


def our_answer(format_name: str, pieces: Sequence[str], tools: Sequence[Any], names: Sequence[str]) -> Answer:
    from ingot.text.parser import events
    from ingot.text.parser.parser import Parser, ThinkingStart
    from ingot.text.tool_formats.registry import format_by_name

    schemas = {name: events.ToolSchema(name, {}) for name in names}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(function.get("name"), str):
            schemas[function["name"]] = events.ToolSchema(function["name"], function.get("parameters") or {})
    spoken = format_by_name(format_name)
    ids = events.call_id_maker(spoken.ids)
    parser = Parser(spoken, tools=list(schemas.values()), thinking=ThinkingStart.UNOPENED, ids=ids)
    read = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    called: list[str] = []
    written: list[str] = []
    for event in read:
        if isinstance(event, events.ToolCallBegan):
            called.append(event.name)
            written.append("")
        elif isinstance(event, events.ToolCallArguments):
            written[-1] += event.fragment
    content = "".join(event.text for event in read if isinstance(event, events.ContentDelta))
    return Answer(tuple(zip(called, map(normal_json, written), strict=True)), content.strip())


def normal_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except json.JSONDecodeError:
        return text


def splits(text: str, seed: int) -> Iterator[list[str]]:
    yield list(text)
    choose = random.Random(seed)
    for _ in range(SPLITS):
        count = max(0, min(len(text) - 1, 1 + len(text) // 9))
        cuts = sorted(choose.sample(range(1, len(text)), count)) if count else []
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@dataclass
class Report:
    """Counts by peer, and a paragraph for each difference."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def count(self, peer: str, what: str) -> None:
        self.counts.setdefault(peer, Counter())[what] += 1

    def differ(self, peer: str, what: str, where: str, **shown: Any) -> None:
        self.count(peer, what)
        lines = "".join(f"    {name}: {value!r:.600}\n" for name, value in shown.items())
        self.differences.append(f"### {peer}: {what}\n\n{where}\n\n{lines}")

    def text(self) -> str:
        kinds = sorted({what for counts in self.counts.values() for what in counts})
        rows = [
            f"| {peer} | {' | '.join(str(counts[what]) for what in kinds)} |" for peer, counts in self.counts.items()
        ]
        head = "| | " + " | ".join(kinds) + " |\n|" + "---|" * (len(kinds) + 1)
        return "\n".join(["# Harvest", "", head, *rows, "", *self.differences])


def replay(peer: str, note: Mapping[str, Any], report: Report) -> None:
    """A peer's text through the formats of ours that could be meant: the first whose calls are the same counts."""
    parser = re.sub(r"tool_?parser$", "", note["parser"], flags=re.IGNORECASE).replace("_", "").lower()
    if parser not in FORMATS:
        report.count(peer, "parser without a format here")
        return
    theirs = their_answer(note)
    names = [name for name, _ in theirs.calls]
    read = {name: our_answer(name, [note["text"]], note["tools"], names) for name in FORMATS[parser]}
    chosen = next((name for name, ours in read.items() if ours.calls == theirs.calls), FORMATS[parser][0])
    ours = read[chosen]
    where = f"{note['test']} ({note['parser']} → {chosen})"
    for pieces in splits(note["text"], seed=len(note["text"])):
        if (again := our_answer(chosen, pieces, note["tools"], names)) != ours:
            report.differ(peer, "OUR ANSWER DEPENDS ON SPLITS", where, text=note["text"], whole=ours, split=again)
            return
    if ours.calls != theirs.calls:
        report.differ(peer, "other calls", where, text=note["text"], theirs=theirs, ours=ours)
    elif ours.content != theirs.content:
        report.differ(peer, "other text", where, text=note["text"], theirs=theirs.content, ours=ours.content)
    else:
        report.count(peer, "same")


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}
CONVERSATIONS: Mapping[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "user": ([{"role": "user", "content": "Hi"}], None),
    "system": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], None),
    "turns": (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye"},
        ],
        None,
    ),
    "tools": ([{"role": "user", "content": "Weather in Ulm?"}], [TOOL]),
    "called": (
        [
            {"role": "user", "content": "Weather in Ulm?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "rain", "tool_call_id": "call00001", "name": "get_weather"},
        ],
        [TOOL],
    ),
}


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def find_templates(sources: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(sources.rglob("*.jinja")):
        if ".venv" not in path.parts:
            yield str(path.relative_to(sources)), path.read_text()
    for path in sorted(sources.rglob("tokenizer_config.json")):
        template = json.loads(path.read_text()).get("chat_template")
        if isinstance(template, str) and ".venv" not in path.parts:
            yield str(path.relative_to(sources)), template


def compare_templates(package: str, sources: Path, report: Report) -> None:
    subject = f"templates of {package}"
    for where, template in find_templates(sources):
        for name, (messages, tools) in CONVERSATIONS.items():
            theirs, ours = render_by_transformers(template, messages, tools), render_here(template, messages, tools)
            if theirs == ours or (theirs[0] == ours[0] == "error"):
                report.count(subject, "same")
            else:
                report.differ(subject, "other prompt", f"{where}, {name}", transformers=theirs, ours=ours)


def render_by_transformers(template: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"tools": tools, "chat_template": template, "add_generation_prompt": True, **TOKENS}
    try:
        [prompt], _ = render_jinja_template([messages], **options)
    except Exception as error:  # whatever a template raises
        return "error", str(error)
    return "prompt", prompt


def render_here(template: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, str]:
    from ingot.text.chat_template.chat_template import ChatTemplate

    try:
        return "prompt", ChatTemplate(template, tokens=TOKENS).render(messages, tools=tools)
    except Exception as error:
        return "error", str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.harvest", description=(__doc__ or "").partition("\n\n")[2])
    folder = Path("~/.cache/ingot/harvest").expanduser()
    parser.add_argument("--into", type=Path, default=folder, help="where peers are downloaded to and installed")
    parser.add_argument("--report", type=Path, default=Path("harvest.md"), help="what the report is written to")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="whose parser tests are recorded")
    parser.add_argument("--templates", nargs="*", default=TEMPLATE_PACKAGES, help="whose chat templates are rendered")
    chosen = parser.parse_args(arguments)
    chosen.into.mkdir(parents=True, exist_ok=True)
    report = Report()
    for peer in chosen.peers:
        if (sources := download(peer, chosen.into)) is None:
            report.count(peer, "not found")
            continue
        for note in record_parser_tests(sources):
            replay(peer, note, report)
    for package in chosen.templates:
        if (sources := download(package, chosen.into)) is not None:
            compare_templates(package, sources, report)
    chosen.report.write_text(report.text())
    print(report.text().partition("###")[0] + f"{len(report.differences)} differences are in {chosen.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

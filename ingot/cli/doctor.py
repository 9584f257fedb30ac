"""`ingot doctor`: what this machine offers, what is missing, and how to get it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ingot.cli import examine
from ingot.cli.examine import Finding
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.config import Settings

ABOUT = "Say what this machine offers, what is missing and how to get it. Fails when something required is missing."
MARKS = {"ok": "ok", "note": "note", "missing": "MISSING"}


def run(arguments: list[str]) -> int:
    parser = CommandParser("doctor", ABOUT)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's folder: what of it is slower than it could be"
    )
    parser.flag("--json", action="store_true", help="print the findings as JSON")
    parser.flag("--network", action="store_true", help="also ask whether the model hub can be reached")
    add_settings(parser, ("the model", "the rest"), leave_out=("context", "dtype", "chat_template"))
    namespace = parser.parse(arguments)
    given = vars(namespace)
    model = given.pop("model", None)
    settings = settle(namespace).settings
    findings = list(look(settings, network="network" in given, model=None if model is None else Path(model)))
    healthy = all(finding.state != "missing" for finding in findings)
    if "json" in given:
        print(json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(_text(findings))
    return 0 if healthy else 1


def look(settings: Settings, network: bool, model: Path | None = None) -> Iterator[Finding]:
    probed = examine.probe_mlx() if model is None else examine.probe_mlx(model)
    yield examine.python()
    yield examine.processor()
    yield from examine.nvidia(probed)
    yield from examine.mlx(probed)
    yield from examine.packages()
    if sys.platform == "linux":
        yield examine.compiler("C++ compiler", ("g++",), "CPUs need it for mx.compile, CUDA for launching graphs")
    yield examine.memory()
    yield examine.disk(settings.models_dir)
    yield examine.open_files()
    yield from examine.extras()
    if model is not None:
        yield from examine.model(probed, model)
    if network:
        yield examine.hub(settings)


def _text(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]:<8}{finding.name:<{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)

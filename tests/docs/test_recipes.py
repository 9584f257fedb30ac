"""The recipes of CONTRIBUTING.md, followed as they are written in a copy of the package: what they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(python|diff)\n(?:#|---) (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

TOOL_FORMAT = """
from ingot.text.parser.events import PastCall
from ingot.text.tool_formats.registry import detect_format
from ingot.text.tool_formats.rendering import render_calls
from tests.text.parser.answers import cut, parsed, told

format = detect_format("{{ tools }} <|call|>", "unheard_of")
text = '<|call|>{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}<|end_call|>'
for place in range(len(text)):
    assert told(parsed(format, cut(text, [place]))) == [("calls", "get_weather", {"city": "Bern", "days": 2})]
assert render_calls(format, [PastCall("get_weather", {"city": "Bern", "days": 2})]) == text
print(format.name)
"""
CODEC = """
import mlx.core as mx
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import RecordCodec
from ingot.config import Settings

codec = RecordCodec(CodecName.parse(Settings(cache_codec="half").cache_codec))
keys = mx.random.normal((1, 2, 8, 64))
for before, after in zip((keys, -keys), codec.decode(codec.encode(keys, -keys), mx.float32)):
    assert float(mx.abs(before - after).max()) < 0.01
print(codec.name)
"""
PROPOSER = """
from pathlib import Path
from types import SimpleNamespace
from ingot.config import Settings
from ingot.engine.loading.draft_models import choose_proposers
from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.speculation.options import SpeculationOptions
from tests import engines

options = SpeculationOptions.parse(Settings(speculate="repeat").speculate)
chosen = choose_proposers(options, Path("/nowhere"), SimpleNamespace(head=None), {}, dtype=None)
engine = engines.start("llama", proposers=chosen.begin(None), fixed_draft_tokens=1)
greedy = {"max_tokens": 8, "sampling": Sampling(temperature=0.0), "stop": Stop(ignore_eos=True), "cache": False}
plain = engines.text_of(engines.answer(engine, Request("plain", ((1, 2, 3),), speculate=(), **greedy)))
assert engine.speculation.drafts == 0
assert engines.text_of(engines.answer(engine, Request("drafted", ((1, 2, 3),), **greedy))) == plain
assert engine.speculation.drafts > 0
engine.close()
print(*chosen.names)
"""
METRIC = """
from ingot.protocol.ingot_api.metrics import ModelMeasurements, render_metrics
from tests.http.scripted import ScriptedEngine

engine = ScriptedEngine()
engine.figures.empty_answers = 3
model = ModelMeasurements(engine.card, engine.health(), engine.figures, engine.speculation)
[line] = [line for line in render_metrics([model], {}).splitlines() if line.startswith("ingot_empty_answers_total")]
print(line.partition(" ")[2])
"""
SETTING = """
import os
from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments

parser = CommandParser("serve", "")
add_settings(parser)
assert settings_from_arguments(parser.parse([])).settings.greeting == "hello"
os.environ["INGOT_GREETING"] = "salut"
assert settings_from_arguments(parser.parse([])).settings.greeting == "salut"
print(settings_from_arguments(parser.parse(["--greeting", "hola"])).settings.greeting)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in which every recipe has been followed. Unchanged files are links."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "ingot", folder / "ingot", copy_function=os.symlink)
    for title, text in RECIPES.items():
        for kind, path, block in BLOCK.findall(text):
            file = folder / path
            before = file.read_text() if file.exists() else ""
            after = f"{before}\n\n{block}" if kind == "python" else patched(before, block, f"{title}: {path}")
            file.unlink(missing_ok=True)
            file.write_text(after)
    return folder


def patched(text: str, diff: str, where: str) -> str:
    """`text` with the lines of a diff changed: those it removes or shows must be there once."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"CONTRIBUTING.md, {where}: the file has {text.count(old)} times\n{old}"
    return text.replace(old, new)


def run(copy: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(copy), str(ROOT)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INGOT_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(copy)},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "output"),
    [
        (TOOL_FORMAT, "novel"),
        (CODEC, "half"),
        (PROPOSER, "repeat"),
        (METRIC, "3"),
        (SETTING, "hola"),
    ],
    ids=["a tool format", "a codec", "a proposer", "a metric", "a setting"],
)
def test_what_a_recipe_adds_works(copy: Path, program: str, output: str) -> None:
    assert run(copy, "-c", program).splitlines()[-1] == output


def test_a_command_that_a_recipe_adds_runs_and_is_listed(copy: Path) -> None:
    assert run(copy, "-m", "ingot.cli.main", "hello", "--name", "you") == "hello, you"
    assert "hello    say hello" in run(copy, "-m", "ingot.cli.main", "--help")


def test_every_block_of_a_recipe_is_followed() -> None:
    blocks = [block for text in RECIPES.values() for block in re.findall(r"^```", text, re.MULTILINE)]
    assert len(blocks) == 2 * sum(len(BLOCK.findall(text)) for text in RECIPES.values()) > 20

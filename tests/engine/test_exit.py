"""A process that ends with an engine still open ends with its own exit code, not with an abort of what runs beneath."""

from __future__ import annotations

import sys

import pytest

from tests.processes import ROOT, run

OPEN = """
import sys
from ingot.engine.request import Request
from tests import scripted
engine = scripted.start(lambda prompt: "Hello " * 1000)
if sys.argv[1] == "running":
    prompt = tuple(scripted.tokenizer().encode(scripted.ANSWER, add_special=False))
    next(iter(engine.generate(Request(id="one", prompts=(prompt,), max_tokens=4000))))
sys.exit(3)
"""


@pytest.mark.parametrize("engine", ["idle", "running"])
def test_leaving_with_an_open_engine_is_no_abort(engine: str) -> None:
    done = run([sys.executable, "-c", OPEN, engine], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, "")

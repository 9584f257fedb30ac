"""schemathesis takes the served document at its word and tries to catch the server lying."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from ingot.config import Settings
from ingot.text.tokenizer.special_tokens import Infill
from tests.http.running import running
from tests.http.scripted import ByteTokenizer, ScriptedEngine, settings
from tests.http.scripted_encoders import EncodingEngine
from tests.media.seeing import TIMED

ROOT = Path(__file__).parents[2]
KEY = "a-long-key"
TALKATIVE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}\n"
    "{% endfor %}{% if mood %}{{ mood }}{% endif %}"
)


SAME_BODIES = (
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/cache/explain", "/v2/rerank", "/api/embeddings"),
)
"""Paths that take the body of another, for which every field was gone through already: they are fuzzed alone."""


def only_fuzzed(paths: Iterable[str]) -> str:
    """What tells schemathesis not to go through every field of these paths' bodies."""
    return "\n".join(f'[[operations]]\ninclude-path = "{path}"\nphases.coverage.enabled = false\n' for path in paths)


def examined(url: str, document: str, folder: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", document, f"--url={url}", "--checks=all", "--no-color"]
    made = subprocess.run(
        [*command, "--seed=1", "--generation-database=none", *flags],
        cwd=folder,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.http.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, cut_long_lines(made.stdout)[-6000:] + made.stderr[-2000:]


def cut_long_lines(text: str) -> str:
    return "\n".join(line[:400] for line in text.splitlines())


def everything(folder: Path) -> tuple[EncodingEngine, Settings]:
    """A server with all that can be switched on, but for pictures."""
    fills = Infill(260, 261, 262, False, None, None, None, frozenset())
    engine = EncodingEngine(tokenizer=ByteTokenizer(TALKATIVE, infill=fills), proposers=("forced", "lookup"))
    stored = settings(responses_store=str(folder / "responses.db"), archive_key_file=folder / "archive.key")
    return engine, stored


def test_the_document_is_true(tmp_path: Path) -> None:
    """A sample: each operation is fuzzed, and one has all its fields gone through."""
    engine, stored = everything(tmp_path)
    with running(engine, stored) as url:
        paths = httpx.get(f"{url}/openapi.json").json()["paths"].keys()
        (tmp_path / "schemathesis.toml").write_text(only_fuzzed(paths - {"/v1/embeddings"}))
        examined(url, f"{url}/openapi.json", tmp_path, "--phases=coverage,fuzzing", "--max-examples=1")
    assert engine.requests and len(engine.encodings) > 10


@pytest.mark.slow
def test_the_document_is_true_to_the_last_field(tmp_path: Path) -> None:
    engine, stored = everything(tmp_path)
    (tmp_path / "schemathesis.toml").write_text(only_fuzzed(SAME_BODIES))
    with running(engine, stored) as url:
        examined(url, f"{url}/openapi.json", tmp_path, "--phases=coverage,fuzzing", "--max-examples=2")
    assert len(engine.requests) > 100 and len(engine.encodings) > 100


SEEING = (*("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/tokenize", "/api/chat", "/api/generate"),)


@pytest.mark.slow
def test_the_document_of_a_server_that_sees_is_true(tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer=ByteTokenizer(TALKATIVE), processor=TIMED)
    with running(engine, settings(responses_store=str(tmp_path / "responses.db"))) as url:
        paths = [f"--include-path={path}" for path in SEEING]
        examined(url, f"{url}/openapi.json", tmp_path, "--phases=coverage,fuzzing", "--max-examples=2", *paths)
    assert len(engine.requests) > 50


@pytest.mark.slow
def test_without_the_key_everything_is_refused_as_documented(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with running(engine, settings(api_key=KEY)) as url:
        # schemathesis comes without the key, and even the document needs it.
        document = tmp_path / "openapi.json"
        document.write_bytes(httpx.get(f"{url}/openapi.json", headers={"x-api-key": KEY}).content)
        examined(url, str(document), tmp_path, "--phases=fuzzing", "--max-examples=1")
    assert engine.requests == []

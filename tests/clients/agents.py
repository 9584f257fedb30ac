"""A server whose model follows a script, for other projects' clients to talk to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.serve import local_server
from tests import scripted
from tests.http.running import running
from tests.http.scripted import settings

HERE = Path(__file__).parent
NODE_BIN = HERE / "node_modules" / ".bin"
PYTHON = HERE / ".venv" / "bin" / "python"
AIDER = HERE / ".venv-aider" / "bin" / "aider"  # what it needs does not agree with what the others do
# Its launcher needs a script that npm may not have run; the program itself is in the package for the platform.
CLAUDE_CODE = next(iter(sorted(HERE.glob("node_modules/@anthropic-ai/claude-code-*/claude"))), NODE_BIN / "claude")
KEY = "sk-testing"
NOT_INSTALLED = "the client is not installed: run `make test-clients`"

needs_python_clients = pytest.mark.skipif(not PYTHON.exists(), reason=NOT_INSTALLED)


def needs_node_client(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (NODE_BIN / name).exists(), reason=NOT_INSTALLED)


@contextmanager
def serving(script: scripted.Script, folder: Path, **changes: Any) -> Iterator[str]:
    """Yields the URL of a real server with a real engine, which keeps what it stores in `folder`."""
    engine = scripted.start(script)
    try:
        with running(engine, settings(responses_store=str(folder / "responses.db"), **changes)) as url:
            yield url
    finally:
        engine.close()


@contextmanager
def serving_default_model(folder: Path, *, context: int) -> Iterator[str]:
    """Yields the URL of a server with the model that is served by default, real weights and all."""
    given = settings(responses_store=str(folder / "responses.db"), context=context, memory="3GB")
    with local_server(given) as url:
        yield url


def run(
    command: list[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    timeout: float = 120,
    codes: tuple[int, ...] = (0,),
) -> str:
    """What a program says that runs in `folder`, with a home there and nothing of ours in its environment."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **(environment or {})}
    made = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert made.returncode in codes, made.stdout[-4000:] + made.stderr[-4000:]
    return made.stdout


def json_lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

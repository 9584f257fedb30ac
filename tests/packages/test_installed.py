"""The wheels in dist/, installed as docs/install.md says into an environment that has nothing, far from the clone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.cli.client import ServerClient
from ingot.config import load_config
from ingot.version import __version__
from tests.docs.pages import guide_commands

pytestmark = pytest.mark.packages

DIST = Path(__file__).parents[2] / "dist"
EXTRA = "[cpu]" if sys.platform == "linux" else ""
LONGEST_START_S = 300


def clean_environment() -> dict[str, str]:
    """This one's, without what would lead Python back to the clone or set ingot up differently."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("INGOT_", "XDG_", "PYTHON"))}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> Path:
    """The folder of an environment's programs, after the one command that a user types."""
    wheel = DIST / f"ingot_mlx-{__version__}-py3-none-any.whl"
    assert wheel.exists(), "run `make packages` first"
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [folder / "bin" / "pip", "install", "--quiet", "--find-links", DIST, f"{wheel}{EXTRA}"]
    done = subprocess.run(command, cwd=elsewhere, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def said(programs: Path, elsewhere: Path) -> Iterator[list[str]]:
    """The ready record of `ingot serve` with the default model, while it serves."""
    shelf = load_config({}, os.environ).settings.models_dir
    command = [programs / "ingot", "serve", "--port", "0", "--models-dir", shelf, "--context", "512"]
    process = subprocess.Popen(
        command, cwd=elsewhere, env=clean_environment(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    watchdog = threading.Timer(LONGEST_START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("try: "):
                break
        yield lines
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_an_extra_is_added_by_its_own_command(programs: Path, elsewhere: Path) -> None:
    def ingot(*words: str) -> str:
        command = [programs / "ingot", *words]
        env = clean_environment()
        return subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=True).stdout

    def state() -> str:
        listed = json.loads(ingot("extras", "--json"))["extras"]
        return next(each["state"] for each in listed if each["name"] == "events")

    assert state() == "missing"
    ingot("extras", "add", "events")
    assert state() == "installed"


@pytest.fixture
def client(said: list[str]) -> ServerClient:
    assert said and said[0].startswith("ready: http://"), said
    return ServerClient(said[0].split()[1])


def test_nothing_comes_from_the_clone(programs: Path, elsewhere: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('ingot').origin)"
    done = subprocess.run(
        [programs / "python", "-c", code], cwd=elsewhere, env=clean_environment(), capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(programs.parent), done.stderr


def test_an_installed_server_answers(client: ServerClient) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    answer = client.post("chat/completions", body)
    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["usage"]["completion_tokens"] > 0


WITHOUT_HUB = ("doctor", "extras", "models", "ps")
"""Commands of the guides that need neither a hub nor a terminal, hours or a service manager."""


def test_the_commands_of_the_guides_run_from_the_package(
    programs: Path, elsewhere: Path, said: list[str], client: ServerClient
) -> None:
    (elsewhere / "system-prompt.txt").write_text("Be brief.")
    shelf = str(load_config({}, os.environ).settings.models_dir)
    port = said[0].split()[1].rsplit(":", 1)[1]
    ran = 0
    for variables, line in guide_commands("ingot"):
        name, words = line[0], [shelf if word == "~/models" else word for word in line]
        if name == "serve":
            words += [] if "--help" in words else ["--print-config"]
        elif not ((name in WITHOUT_HUB and "add" not in words) or line == ["show", "smollm2-135m"]):
            words = [*line[:2], "--help"] if name in ("bench", "cache", "service") else [name, "--help"]
        env = clean_environment() | {"INGOT_MODELS_DIR": shelf} | variables
        done = subprocess.run([programs / "ingot", *words], cwd=elsewhere, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), (words, done.stderr)
        assert line != ["ps"] or port in done.stdout
        ran += 1
    assert ran > 40


def test_the_requests_of_the_guides_are_answered(client: ServerClient, said: list[str]) -> None:
    url = said[0].split()[1].removesuffix("/v1")
    for _, words in guide_commands("curl"):
        if any(part in " ".join(words) for part in ("/v1/audio", "@", "specprefill")):
            continue
        sent = [word.replace("http://127.0.0.1:8000", url) for word in words]
        done = subprocess.run(["curl", "-sS", "--fail-with-body", *sent], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_an_installed_server_has_its_page(client: ServerClient) -> None:
    page = io.BytesIO()
    for path in ("/", "/static/app.js", "/static/style.css"):
        client.download(path, page)
    assert b"<title>" in page.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="kernels of ours are for Linux CPUs")
def test_an_installed_server_has_its_kernels(programs: Path, elsewhere: Path, said: list[str]) -> None:
    assert not [line for line in said if line.startswith("note: no ")]
    done = subprocess.run(
        [programs / "ingot", "doctor", "--json"],
        cwd=elsewhere,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (done.returncode, found["BLAS"]["state"], found["native kernels"]["state"]) == (0, "ok", "ok")

"""`ingot cache` against a running server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.cli import cache
from ingot.cli.client import ServerClient, ServerError
from ingot.errors import ConfigError
from tests import engines
from tests.cli.scripted import environment
from tests.http.running import running
from tests.http.scripted import settings
from tests.processes import INGOT

PROMPT = list(range(1, 40))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Its model has no files to identify it by."""
    engine = engines.start("llama", cache_bytes=1 << 22)
    engine._loaded = replace(engine._loaded, folder=None)
    with running(engine, settings()) as made:
        ServerClient(made).post("completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
        yield made
    engine.close()


def body(folder: Path, value: object) -> str:
    path = folder / "body.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_it_shows_how_much_is_cached(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.run_cache(["show", "--url", url]) == 0
    output = capsys.readouterr().out
    assert "0 of 1 prompt reused a prefix: 0 of 39 tokens (0%)" in output
    assert "no salt: 41 tokens in 2 records" in output


def test_it_explains_a_request(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = [*PROMPT[:20], 90, 91]
    assert cache.run_cache(["explain", body(tmp_path, {"prompt": edited}), "--url", url]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "20 of 22 tokens would be reused: diverged"
    assert output[1] == "they diverge in the prompt, at character 20:"
    assert cache.run_cache(["explain", body(tmp_path, {"prompt": edited}), "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["diverged"]["token"] == 20


def test_several_prompts_are_explained_one_by_one(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.run_cache(["explain", body(tmp_path, {"prompt": [PROMPT, [80, 81]]}), "--url", url]) == 0
    assert "prompt 0: 38 tokens: complete\nprompt 1: 0 tokens: unseen" in capsys.readouterr().out


def test_it_clears(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.run_cache(["clear", "--url", url]) == 0
    assert capsys.readouterr().out.startswith("freed ")
    cache.run_cache(["show", "--url", url])
    assert capsys.readouterr().out.startswith("0 B of ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("shwo",), "ingot cache: unknown action shwo; did you mean show?"),
        (("explain",), "ingot cache: the following arguments are required: FILE"),
        (("explain", "no-such-file"), "ingot cache: cannot read no-such-file"),
        (("show", "--ur", "x"), "ingot cache: unknown flag --ur; did you mean --url?"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    command = [INGOT, "cache", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_what_one_server_cached_is_exported_and_imported_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.engine.test_cache_admin import start

    path = str(tmp_path / "prefixes.safetensors")
    both = start("llama", tmp_path / "a"), start("llama", tmp_path / "b")
    limits = settings(archive_key_file=tmp_path / "archive.key")
    with running(both[0], limits) as here, running(both[1], limits) as there:
        ServerClient(here).post("completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
        assert cache.run_cache(["export", path, "--url", here]) == 0
        assert capsys.readouterr().out.startswith("wrote ")
        assert cache.run_cache(["import", path, "--url", there]) == 0
        assert capsys.readouterr().out == "cached 41 new tokens\n"
        Path(path).write_bytes(b"mine")
        with pytest.raises(ConfigError, match="exists; --force overwrites it"):
            cache.run_cache(["export", path, "--url", here])
        assert Path(path).read_bytes() == b"mine"
        assert cache.run_cache(["export", path, "--force", "--url", here]) == 0
        assert Path(path).stat().st_size > 1000
    for engine in both:
        engine.close()


def test_an_export_that_fails_leaves_no_file_behind(url: str, tmp_path: Path) -> None:
    path = tmp_path / "prefixes.safetensors"
    with pytest.raises(ServerError, match="no files to identify it by"):
        cache.run_cache(["export", str(path), "--url", url])
    assert not list(tmp_path.iterdir())

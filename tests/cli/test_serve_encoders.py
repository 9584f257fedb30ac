"""`ingot serve` with further models, from folders, to an answer over HTTP."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench import random_models
from ingot.cli.client import ServerClient
from ingot.cli.serve import ready_record
from ingot.text.tool_formats.registry import find_format
from tests.cli.scripted import environment
from tests.cli.test_serve import CARD
from tests.encoders import card, write_encoder, write_sentence_files
from tests.processes import INGOT, run, start

LONGEST_START_S = 120


def test_the_ready_record_names_each_encoder_and_what_it_is_for() -> None:
    record = ready_record(
        "http://x", CARD, find_format(None, ""), needs_key=False, further=[card("embedding"), card("rerank")]
    ).splitlines()
    assert record[1:3] == [
        "also: toy-embedding (none) for vectors of 4 numbers | inputs of 64 tokens",
        "also: toy-rerank (none) for reranking | inputs of 64 tokens",
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    random_models.write(folder / "small", "dispatch")
    write_sentence_files(write_encoder(folder / "vectors", "bert"), {"pooling_mode_mean_tokens": True})
    write_encoder(folder / "scores", "bert", head=True)
    return folder


def test_encoders_given_by_flag_answer(models: Path, tmp_path: Path) -> None:
    flags = ["--embedding-model", str(models / "vectors"), "--rerank-model", str(models / "scores")]
    command = [INGOT, "serve", str(models / "small"), "--port", "0", "--context", "256", *flags]
    process = start(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path))
    watchdog = threading.Timer(LONGEST_START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("ready: ")).split()[1]
        client = ServerClient(url)
        assert [model["id"] for model in client.get("models")["data"]] == ["small", "vectors", "scores"]
        assert len(client.post("embeddings", {"input": ["cat", "dog"]})["data"][1]["embedding"]) == 16
        ranked = client.post("rerank", {"query": "cat", "documents": ["dog", "cat"], "model": "scores"})
        assert len(ranked["results"]) == 2
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_an_encoder_that_is_not_there_is_one_line_and_exit_code_1(models: Path, tmp_path: Path) -> None:
    command = [INGOT, "serve", str(models / "small"), "--port", "0", "--embedding-model", "all-minilm-l6", "--offline"]
    done = run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert done.returncode == 1 and "Did you mean 'all-minilm-l6-v2'?" in done.stderr

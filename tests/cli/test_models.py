from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from gguf.constants import GGMLQuantizationType as Kind

from ingot.config import DEFAULT_MODEL
from tests.cli.conftest import Done
from tests.cli.scripted import INGOT, environment
from tests.models.gguf.making import CONTEXT, as_q4_k_m, tiny_model


def models(home: Path, *flags: str) -> str:
    command = [INGOT, "models", *flags]
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True).stdout


def test_a_packaged_model_is_listed_before_it_is_fetched(tmp_path: Path) -> None:
    listed = json.loads(models(tmp_path, "--json"))
    assert listed["models_dir"] == str(tmp_path / ".cache/ingot/models")
    first = listed["models"][0]
    assert (first["name"], first["kind"], first["path"]) == (DEFAULT_MODEL, "packaged", None)
    assert all(model["kind"] == "packaged" and model["bytes"] > 0 for model in listed["models"])
    assert "not fetched yet" in models(tmp_path)


def test_folders_and_files_in_the_models_folder_are_listed_with_their_size(
    tmp_path: Path, run_here: Callable[..., Done]
) -> None:
    shelf = tmp_path / "shelf"
    (shelf / "mine").mkdir(parents=True)
    (shelf / "mine" / "config.json").write_text("{}")
    (shelf / "mine" / "model.safetensors").write_bytes(bytes(98))
    (shelf / "some.gguf").write_bytes(bytes(7))
    (shelf / "notes").mkdir()
    (shelf / ".half.part").mkdir()
    listed = json.loads(run_here("models", "--json", "--models-dir", shelf).stdout)["models"]
    found = {Path(model["name"]).name: model["bytes"] for model in listed if model["kind"] == "local"}
    assert found == {"mine": 100, "some.gguf": 7}


def test_a_model_that_is_here_is_listed_with_what_it_takes_in_memory(
    tmp_path: Path, run_here: Callable[..., Done]
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = as_q4_k_m(tiny_model("llama")).write(shelf / "tiny.gguf")
    listed = json.loads(run_here("models", "--json", "--models-dir", shelf).stdout)["models"]
    memory = next(model["memory"] for model in listed if model["path"] == str(path))
    assert memory["context"] == CONTEXT and memory["at_full_context"] == CONTEXT * memory["per_token"] > 0
    assert memory["weights"] > 0
    assert "in memory" in run_here("models", "--models-dir", shelf).stdout


def test_pull_says_what_the_model_takes_in_memory_and_prints_its_folder_alone(
    tmp_path: Path, run_here: Callable[..., Done]
) -> None:
    path = as_q4_k_m(tiny_model("llama")).write(tmp_path / "tiny.gguf")
    done = run_here("pull", path, "--models-dir", tmp_path / "shelf")
    assert done.returncode == 0
    assert Path(done.stdout.strip()).is_dir()
    assert "of memory" in done.stderr and f"for all {CONTEXT}" in done.stderr


def test_models_of_the_hub_cache_are_listed_by_their_id(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "blobs" / "abc").write_bytes(bytes(12))
    snapshot = repository / "snapshots" / "deadbeef"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / "abc")
    (repository / "refs" / "main").write_text("deadbeef")
    listed = json.loads(models(tmp_path, "--json"))["models"]
    hub = [(model["name"], model["bytes"]) for model in listed if model["kind"] == "hub"]
    assert hub == [("someone/tiny", 12)]


def test_pull_says_which_weights_a_conversion_moves(tmp_path: Path, run_here: Callable[..., Done]) -> None:
    source = tiny_model("llama", kinds=[Kind.IQ4_NL]).write(tmp_path / "tiny.gguf")
    done = run_here("pull", source)
    assert done.returncode == 0
    assert Path(done.stdout.strip()).name.startswith("tiny-")
    assert "note: IQ4_NL weights are held in 6 bits, which moves them by 1.5 % at most" in done.stderr

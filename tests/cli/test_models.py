"""`ingot convert`, from the command line to a model that runs."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.cli.main import main
from ingot.cli.models import models_in_folder
from ingot.config import DEFAULT_MODEL
from ingot.kernels.device import current_device
from ingot.models.adapter import load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.loading import drafter_kind, own_drafter
from ingot.models.draft_heads.mtp import check_draft_head, load_mtp_head
from ingot.models.files.folder_checks import read_record_layout
from ingot.models.files.model_store import store_model
from ingot.models.files.progress import no_progress
from tests.cli.conftest import Done
from tests.cli.scripted import environment
from tests.models.draft_heads import test_block
from tests.models.draft_heads.making import make, named, write, write_shards
from tests.models.draft_heads.test_hybrid import HYBRID
from tests.models.experts.mixtures import saved
from tests.models.gguf.making import CONTEXT, as_q4_k_m, tiny_model
from tests.processes import INGOT, run


def models(home: Path, *flags: str, by: Callable[..., Any] = run) -> str:
    command = [INGOT, "models", *flags]
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    listed: str = by(command, capture_output=True, text=True, timeout=60, env=env, check=True).stdout
    return listed


def test_a_packaged_model_is_listed_before_it_is_fetched(tmp_path: Path) -> None:
    listed = json.loads(models(tmp_path, "--json"))
    assert listed["models_dir"] == str(tmp_path / ".cache/ingot/models")
    first = listed["models"][0]
    assert (first["name"], first["kind"], first["path"]) == (DEFAULT_MODEL, "packaged", None)
    assert all(model["kind"] == "packaged" and model["bytes"] > 0 for model in listed["models"])
    assert "not fetched yet" in models(tmp_path, by=subprocess.run)


def test_a_folder_serves_all_models_in_it_by_the_names_of_their_folders_and_files(tmp_path: Path) -> None:
    def write(path: str, *names: str) -> None:
        for name in names:
            (tmp_path / path).mkdir(parents=True, exist_ok=True)
            (tmp_path / path / name).touch()

    write("plain", "config.json", "model.safetensors")
    write("org/name", "config.json", "model-00001-of-00002.safetensors")
    write("org/plain", "config.json", "model.safetensors")
    write("speaks", "config.json", "kokoro-v1_0.safetensors")
    write("no-weights", "config.json")
    write(".hidden", "config.json", "model.safetensors")
    write("plain/inner", "config.json", "model.safetensors")
    write(".", "tiny=1.gguf", "large-00001-of-00002.gguf", "large-00002-of-00002.gguf")
    assert {name: str(path.relative_to(tmp_path)) for name, path in models_in_folder(tmp_path).items()} == {
        "plain": "plain",
        "name": "org/name",
        "org/plain": "org/plain",
        "speaks": "speaks",
        "tiny-1": "tiny=1.gguf",
        "large": "large-00001-of-00002.gguf",
    }


def test_a_converted_file_is_served_once(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()

    def build(folder: Path) -> None:
        (folder / "config.json").touch()
        (folder / "model.safetensors").touch()

    store_model(tmp_path / ("tiny-" + "a" * 12), {"source": "gguf:tiny.gguf", "sha256": "a" * 64}, build, no_progress)
    assert models_in_folder(tmp_path) == {"tiny": tmp_path / "tiny.gguf"}


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


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return tmp_path / ".cache/ingot/models"


def fill(target: Path) -> None:
    (target / "config.json").write_text("{}")


def kept(shelf: Path, folder: str, sha256: str = "0123456789abcdef") -> Path:
    origin = {"source": "gguf:tiny.gguf", "sha256": sha256}
    return store_model(shelf / folder, origin, fill, no_progress)


def rm(home: Path, *words: str, by: Callable[..., Any] = run) -> subprocess.CompletedProcess[str]:
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    done: subprocess.CompletedProcess[str] = by(
        [INGOT, "rm", *words], capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )
    return done


def answered(home: Path, answer: bytes, *words: str) -> int:
    """The exit code of the command that is asked on a terminal."""
    ours, theirs = pty.openpty()
    env = environment(home, HF_HUB_CACHE=str(home / "hub"))
    try:
        os.write(ours, answer)
        ended = run([INGOT, "rm", *words], stdin=theirs, capture_output=True, timeout=60, env=env)
    finally:
        os.close(ours)
        os.close(theirs)
    return ended.returncode


def test_a_model_is_removed_by_its_name_without_its_hash(tmp_path: Path, shelf: Path) -> None:
    gone, stays = kept(shelf, "Tiny-0123456789ab"), kept(shelf, "Other-0123456789ab")
    done = rm(tmp_path, "tiny", "--yes", by=subprocess.run)
    assert (done.returncode, done.stdout) == (0, "removed Tiny-0123456789ab from the models folder\n")
    assert not gone.exists() and stays.exists()
    assert not [left for left in shelf.iterdir() if left.name.endswith(".part")]


def test_it_asks_first_and_takes_anything_but_yes_for_no(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    for answer in (b"\n", b"n\n", b"what\n"):
        assert answered(tmp_path, answer, "tiny") == 1
        assert folder.exists()
    assert answered(tmp_path, b"y\n", "tiny") == 0
    assert not folder.exists()


def test_without_a_terminal_it_removes_nothing_unless_told_to(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    done = rm(tmp_path, "tiny")
    assert done.returncode == 2 and "give --yes" in done.stderr
    assert folder.exists()


def test_what_ingot_did_not_put_there_is_refused(tmp_path: Path, shelf: Path) -> None:
    mine = shelf / "mine"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    for name in ("mine", str(mine), str(tmp_path / "own.gguf"), str(tmp_path)):
        done = rm(tmp_path, name, "--yes")
        assert done.returncode == 1 and "of your own" in done.stderr
    assert (mine / "config.json").exists() and (tmp_path / "own.gguf").exists()


def test_a_name_that_several_models_have_lists_them_and_removes_none(tmp_path: Path, shelf: Path) -> None:
    folders = [kept(shelf, "tiny-0123456789ab"), kept(shelf, "tiny-fedcba987654", "fedcba9876543210")]
    done = rm(tmp_path, "tiny", "--yes")
    assert done.returncode == 1
    assert all(folder.name in done.stderr and folder.exists() for folder in folders)
    assert rm(tmp_path, "tiny-fedcba987654", "--yes").returncode == 0
    assert folders[0].exists() and not folders[1].exists()


def test_a_beginning_of_a_name_is_not_enough_to_remove_it(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    done = rm(tmp_path, "ti", "--yes")
    assert done.returncode == 1 and "there is no model 'ti'" in done.stderr
    assert folder.exists()


def test_one_wrong_name_among_several_removes_none(tmp_path: Path, shelf: Path) -> None:
    folder = kept(shelf, "tiny-0123456789ab")
    assert rm(tmp_path, "tiny", "nothing", "--yes").returncode == 1
    assert folder.exists()


def test_a_packaged_model_that_is_not_here_is_said_to_be_so(tmp_path: Path) -> None:
    assert "has not been fetched" in rm(tmp_path, "smollm2-135m", "--yes").stderr


def test_a_model_of_the_hub_is_removed_from_its_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / "deadbeef"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "blobs" / "abc").write_bytes(bytes(12))
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / "abc")
    (repository / "refs" / "main").write_text("deadbeef")
    done = rm(tmp_path, "someone/tiny", "--yes")
    assert done.returncode == 0 and "from the hub's cache" in done.stdout
    assert not repository.exists()


def test_models_are_listed_without_the_hash_unless_two_have_the_same_name(
    shelf: Path, run_here: Callable[..., Done]
) -> None:
    kept(shelf, "one-0123456789ab")
    for folder, sha256 in (("two-0123456789ab", "0123456789abcdef"), ("two-fedcba987654", "fedcba9876543210")):
        kept(shelf, folder, sha256)
    told = json.loads(run_here("models", "--json").stdout)
    names = [model["name"] for model in told["models"] if model["kind"] == "local"]
    assert names == ["one", "two-0123456789ab", "two-fedcba987654"]


ROOT = HYBRID.parents[2]


def converted(*arguments: str | Path) -> int:
    return main(["convert", *map(str, arguments)])


def tensors_of(file: Path) -> dict[str, mx.array]:
    stored = mx.load(str(file))
    assert isinstance(stored, dict)
    return stored


def accepted(folder: Path) -> float:
    adapter = load_model_adapter(folder, current_device())
    source = find_head(folder, adapter.config)
    assert source is not None
    return check_draft_head(load_mtp_head(source, adapter), adapter)


def kept_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "packed"
    assert converted(HYBRID, target, "--bits", "8", "--group-size", "32") == 0
    return target


def test_weights_are_packed_and_the_head_beside_them_is_not(packed: Path) -> None:
    assert {key: kept_config(packed)["quantization"][key] for key in ("bits", "group_size")} == {
        "bits": 8,
        "group_size": 32,
    }
    own, head = tensors_of(packed / "model.safetensors"), tensors_of(packed / "model-mtp.safetensors")
    assert own["language_model.model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    assert not any("mtp" in name for name in own)
    assert len(head) == 15
    assert {array.dtype for array in head.values()} == {mx.bfloat16}
    published = tensors_of(HYBRID / "model.safetensors")
    assert mx.array_equal(head["mtp.fc.weight"], published["mtp.fc.weight"])
    assert mx.array_equal(head["mtp.norm.weight"], published["mtp.norm.weight"] + 1)


def test_experts_are_packed_and_laid_beside_each_other(tmp_path: Path) -> None:
    mixture, target = saved("qwen3_moe", tmp_path / "mixture"), tmp_path / "made"
    assert converted(mixture, target, "--experts", "--group-size", "32") == 0
    assert kept_config(target)["quantization"]["bits"] == 4
    layers = [read_record_layout(file) for file in sorted(target.glob("model-experts-*.safetensors"))]
    assert layers and all(len(parts) == 9 for layer in layers for parts in layer.values())
    load_model_adapter(target, current_device()).close()
    assert converted(target, tmp_path / "again", "--experts") != 0  # they lie so already
    assert not (tmp_path / "again").exists()


def test_a_model_without_experts_has_none_to_lay_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(HYBRID, tmp_path / "made", "--experts") != 0
    assert "no mixture of experts" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_packed_model_runs_with_its_head_and_has_its_tokenizer(packed: Path) -> None:
    assert accepted(packed) > 0.4
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (packed / name).read_bytes() == (HYBRID / name).read_bytes()


def test_four_bits_in_groups_of_64_are_what_nobody_has_to_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(HYBRID, tmp_path / "made") == 0
    quantization = kept_config(tmp_path / "made")["quantization"]
    assert (quantization["bits"], quantization["group_size"]) == (4, 64)
    out, error = capsys.readouterr()
    assert out == f"{tmp_path / 'made'}\n"
    assert "head: 15 tensors, 1182464 bytes (1.2 MB) read from model.safetensors" in error


def test_a_head_is_joined_to_a_packed_model_from_the_shards_that_hold_it(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, donor = tmp_path / "bare", tmp_path / "donor"
    shutil.copytree(packed, bare, ignore=shutil.ignore_patterns("model-mtp*", "ingot.json"))
    published = tensors_of(HYBRID / "model.safetensors")
    head = {name: array for name, array in published.items() if name.startswith("mtp.")}
    others = {name: array for name, array in published.items() if name not in head}
    write_shards(donor, {}, {"model-1.safetensors": others, "model-2.safetensors": head})
    (donor / "model-1.safetensors").unlink()
    assert converted(bare, tmp_path / "joined", "--head-from", donor) == 0
    assert "1182464 bytes (1.2 MB) read from model-2.safetensors" in capsys.readouterr().err
    assert accepted(tmp_path / "joined") > 0.4
    assert (tmp_path / "joined" / "model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()


def test_a_head_of_another_model_is_refused_before_anything_is_written(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make("qwen3_5")
    donor = write(tmp_path / "donor", made.config, files={"model.safetensors": {**made.base, **named(made)}})
    assert converted(packed, tmp_path / "joined", "--head-from", donor) == 1
    assert "do not fit its config: of the wrong shape" in capsys.readouterr().err
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bits", "7"], "--bits must be one of 2, 3, 4, 5, 6, 8, not 7"),
        (["--group-size", "16"], "--group-size must be one of 32, 64, 128, not 16"),
        (["--mode", "int4"], "--mode must be one of affine, mxfp4, nvfp4, mxfp8, not 'int4'"),
        (["--mode", "mxfp4", "--bits", "8"], "--mode mxfp4 has 4 bits in groups of 32; leave out --bits"),
        (["--bitss", "4"], "unknown flag --bitss; did you mean --bits?"),
    ],
)
def test_what_mlx_does_not_have_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(HYBRID, tmp_path / "made", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_packed_model_is_not_packed_again(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert converted(packed, tmp_path / "made") == 2
    assert "packed already; --head-from joins a head" in capsys.readouterr().err
    assert converted(packed, tmp_path / "made", "--bits", "4", "--head-from", HYBRID) == 2
    assert "would only lose more" in capsys.readouterr().err


def test_a_checkpoint_without_a_head_gives_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = HYBRID.parent / "dense"
    assert converted(HYBRID, tmp_path / "made", "--head-from", dense) == 1
    assert "holds no head that is known for models of type qwen3_5" in capsys.readouterr().err
    assert converted(dense, tmp_path / "made") == 0
    assert "it has no draft head" in capsys.readouterr().err


def test_a_drafter_is_joined_to_a_model_and_kept_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, donor = HYBRID.parent / "dense", test_block.written(tmp_path / "donor", "dflash")
    assert converted(dense, tmp_path / "made", "--head-from", donor) == 0
    assert "read from model.safetensors" in capsys.readouterr().err
    joined = own_drafter(tmp_path / "made")
    assert joined == tmp_path / "made" / "mtp" and drafter_kind(joined) == "block"
    shutil.copytree(joined, tmp_path / "dense" / "mtp")
    shutil.copytree(dense, tmp_path / "dense", dirs_exist_ok=True)
    assert converted(tmp_path / "dense", tmp_path / "kept") == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "kept" / "mtp" / name).read_bytes() == (donor / name).read_bytes()


def test_what_is_there_already_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert converted(HYBRID, tmp_path / "mine") == 1
    assert "mine is there already" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_what_was_made_before_is_not_made_again(packed: Path) -> None:
    before = (packed / "model.safetensors").stat().st_mtime_ns
    assert converted(HYBRID, packed, "--bits", "8", "--group-size", "32") == 0
    assert (packed / "model.safetensors").stat().st_mtime_ns == before


DIES = """
import os, signal, sys
from ingot.models import convert as conversion
conversion.write_head = lambda source, file: os.kill(os.getpid(), signal.SIGKILL)
from ingot.cli.main import main
main(sys.argv[1:])
"""


def test_killed_in_the_middle_it_leaves_nothing_and_the_next_run_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "made"
    command = [sys.executable, "-c", DIES, "convert", str(HYBRID), str(target)]
    died = run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not target.exists()
    assert list(tmp_path.glob(".made.*.part"))
    assert converted(HYBRID, target) == 0
    assert accepted(target) > 0.2
    assert not list(tmp_path.glob(".made.*.part"))

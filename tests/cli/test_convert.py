"""`ingot convert`, from the command line to a model that runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.cli.main import main
from ingot.kernels.device import current
from ingot.models.adapter import load
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import load_head
from ingot.models.heads.probe import check_head
from tests.models.draft_heads.making import make, named, write, write_shards
from tests.models.draft_heads.test_hybrid import HYBRID

ROOT = HYBRID.parents[2]


def converted(*arguments: str | Path) -> int:
    return main(["convert", *map(str, arguments)])


def tensors_of(file: Path) -> dict[str, mx.array]:
    stored = mx.load(str(file))
    assert isinstance(stored, dict)
    return stored


def accepted(folder: Path) -> float:
    adapter = load(folder, current())
    source = find_head(folder, adapter.config)
    assert source is not None
    return check_head(load_head(source, adapter), adapter)


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
    assert "it has no head" in capsys.readouterr().err


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
    died = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not target.exists()
    assert list(tmp_path.glob(".made.*.part"))
    assert converted(HYBRID, target) == 0
    assert accepted(target) > 0.2
    assert not list(tmp_path.glob(".made.*.part"))

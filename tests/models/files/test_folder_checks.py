"""A folder that claims what its files do not hold is refused before anything is built."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from safetensors.numpy import save_file

from ingot.errors import ModelError
from ingot.models.files import folder_checks
from ingot.models.files.folder_checks import check_model_folder, read_safetensors_header, stated_context


def folder_of(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tensors = {f"model.layers.{number}.w": np.zeros(2, np.float32) for number in range(4)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("config", [{"num_hidden_layers": 4}, {}, {"text_config": {"num_hidden_layers": 4}}])
def test_what_the_weights_hold_is_believed(tmp_path: Path, config: dict[str, Any]) -> None:
    check_model_folder(folder_of(tmp_path, **config), "it")


@pytest.mark.parametrize("config", [{"num_hidden_layers": 10**6}, {"n_layer": 5}, {"text_config": {"num_layers": 9}}])
def test_more_layers_than_there_are_tensors_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="layers, and there are weights of 4 tensors"):
        check_model_folder(folder_of(tmp_path, **config), "it")


@pytest.mark.parametrize("file", ["model-2.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, file: str) -> None:
    os.mkfifo(folder_of(tmp_path, num_hidden_layers=2) / file)
    with pytest.raises(ModelError, match=f"{file} is no regular file"):
        check_model_folder(tmp_path, "it")


def test_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    folder_of(tmp_path, num_hidden_layers=2)
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")
    check_model_folder(tmp_path, "it")


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[}", b"\x01\0\0\0\0\0\0\x007"]
)
def test_weights_that_are_none_are_named(tmp_path: Path, raw: bytes) -> None:
    (folder_of(tmp_path, num_hidden_layers=2) / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        check_model_folder(tmp_path, "it")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_larger_than_any_of_its_kind_is_not_read(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_checks, "CONFIG_BYTES", 1000)
    monkeypatch.setattr(folder_checks, "TOKENIZER_BYTES", 1000)
    (folder_of(tmp_path) / file).write_bytes(b" " * 1001)
    with pytest.raises(ModelError, match=f"{file} is larger"):
        check_model_folder(tmp_path, "it")


@pytest.mark.parametrize("stated", [-1, 0])
def test_a_context_of_no_tokens_is_refused(stated: int) -> None:
    with pytest.raises(ModelError, match="max_position_embeddings"):
        stated_context({"max_position_embeddings": stated})


SHAPES = some.lists(some.integers(0, 4), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=some.dictionaries(some.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), SHAPES))
def test_every_tensor_is_told_with_its_shape_and_size(shapes: dict[str, list[int]], tmp_path: Path) -> None:
    tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "it", metadata={"format": "pt"})
    found = read_safetensors_header(tmp_path / "it")
    assert {name: (tensor.shape, tensor.nbytes, tensor.dtype) for name, tensor in found.items()} == {
        name: (array.shape, array.nbytes, "F16") for name, array in tensors.items()
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=some.integers(0, 119), byte=some.integers(0, 255))
def test_a_damaged_file_is_refused_or_read_as_one_that_could_be(cut: int, byte: int, tmp_path: Path) -> None:
    save_file({"weight": np.zeros((2, 3), np.float32)}, tmp_path / "it")
    raw = bytearray((tmp_path / "it").read_bytes())
    raw[min(cut, len(raw) - 1)] = byte
    (tmp_path / "it").write_bytes(raw)
    try:
        found = read_safetensors_header(tmp_path / "it")
    except ModelError:
        return
    assert all(0 <= tensor.nbytes <= 24 for tensor in found.values())


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}


@pytest.mark.parametrize(
    "entry",
    [
        entry(data_offsets=[0, 9]),
        entry(data_offsets=[4, 0]),
        entry(data_offsets=[0]),
        entry(shape=[-1]),
        entry(shape="x"),
    ],
)
def test_a_tensor_that_its_file_cannot_hold_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"weight": entry}).encode()
    (tmp_path / "it").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="no safetensors file, or cut short"):
        read_safetensors_header(tmp_path / "it")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it cannot be read: No such file"):
        read_safetensors_header(tmp_path / "it")

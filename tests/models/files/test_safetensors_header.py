"""What a safetensors file's header is believed to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from safetensors.numpy import save_file

from ingot.errors import ModelError
from ingot.models.files.safetensors_header import read_header

SHAPES = some.lists(some.integers(0, 4), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=some.dictionaries(some.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), SHAPES))
def test_every_tensor_is_told_with_its_shape_and_size(shapes: dict[str, list[int]], tmp_path: Path) -> None:
    tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "it", metadata={"format": "pt"})
    found = read_header(tmp_path / "it")
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
        found = read_header(tmp_path / "it")
    except ModelError:
        return
    assert all(0 <= tensor.nbytes <= 24 for tensor in found.values())


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}


@pytest.mark.parametrize(
    "told",
    [
        entry(data_offsets=[0, 9]),
        entry(data_offsets=[4, 0]),
        entry(data_offsets=[0]),
        entry(shape=[-1]),
        entry(shape="x"),
    ],
)
def test_a_tensor_that_its_file_cannot_hold_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"weight": told}).encode()
    (tmp_path / "it").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="no safetensors file, or cut short"):
        read_header(tmp_path / "it")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it cannot be read: No such file"):
        read_header(tmp_path / "it")

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ingot.models.files.tensor_files import Tensor, write_weights


def group(name: str, rows: int) -> list[Tensor]:
    values = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    return [Tensor(f"{name}.weight", values.astype(np.uint32)), Tensor(f"{name}.scales", values.astype(np.float16))]


def names(groups: list[list[Tensor]]) -> list[str]:
    return [tensor.name for group in groups for tensor in group]


def test_what_is_written_is_read_back_by_safetensors(tmp_path: Path) -> None:
    groups = [group("a", 3), group("b", 5)]
    write_weights(tmp_path, groups, names(groups))
    read = load_file(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    for tensor in (tensor for group in groups for tensor in group):
        assert read[tensor.name].dtype == tensor.array.dtype
        np.testing.assert_array_equal(read[tensor.name], tensor.array)


def test_mlx_reads_the_file_including_bfloat16(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    values = np.array([[1.0, -2.5, 0.15625]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_weights(tmp_path, [[Tensor("a", bits, bfloat16=True)]], ["a"])
    read = mx.load(str(tmp_path / "model.safetensors"))["a"]
    assert read.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(read.astype(mx.float32)), values)


def test_a_large_model_is_written_in_parts_that_an_index_lists(tmp_path: Path) -> None:
    groups = [group(f"layer{number}", 16) for number in range(5)]
    write_weights(tmp_path, groups, names(groups), shard_bytes=2000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    parts = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert parts == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name, part in index["weight_map"].items():
        with safe_open(tmp_path / part, "numpy") as file:
            assert name in file.keys()  # noqa: SIM118
    assert sorted(index["weight_map"]) == sorted(names(groups))


def test_tensors_that_belong_together_stay_in_one_part(tmp_path: Path) -> None:
    groups = [group("a", 16), group("b", 16)]
    write_weights(tmp_path, groups, names(groups), shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["a.weight"] == index["a.scales"] != index["b.weight"] == index["b.scales"]

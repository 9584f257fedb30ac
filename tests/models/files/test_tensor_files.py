"""Files that torch saved, read without torch and without running what is in them."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ingot.errors import ModelError
from ingot.models.files import tensor_files
from ingot.models.files.tensor_files import NamedTensor, write_safetensors

NUMBERS = np.arange(6, dtype=np.float16)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def pair(*numbers: int) -> bytes:
    return b"(" + b"".join(b"M" + struct.pack("<H", number) for number in numbers) + b"t"


def tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, size: int = 6, key: str = "0"
) -> bytes:
    """How torch pickles one."""
    storage = b"(" + text("storage") + b"ctorch\nHalfStorage\n" + text(key) + text("cpu") + b"K" + bytes([size]) + b"tQ"
    arguments = storage + b"K" + bytes([offset]) + pair(*shape) + pair(*strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def saved(folder: Path, value: bytes, numbers: np.ndarray = NUMBERS) -> Path:
    file = folder / "a.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + text("w") + value + b"s.")
        archive.writestr("archive/data/0", numbers.tobytes())
    return file


def test_a_tensor_is_read_as_it_lies(tmp_path: Path) -> None:
    read = tensor_files.read_torch_archive(saved(tmp_path, tensor((2, 3), (3, 1))))
    assert read["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and read["w"].dtype == np.float16


def test_a_transposed_tensor_and_part_of_a_storage_are_read_too(tmp_path: Path) -> None:
    assert tensor_files.read_torch_archive(saved(tmp_path, tensor((3, 2), (1, 3))))["w"].tolist() == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    assert tensor_files.read_torch_archive(saved(tmp_path, tensor((2,), (2,), offset=1)))["w"].tolist() == [1, 3]


@pytest.mark.parametrize("name", ["os\nsystem", "builtins\neval", "torch\nload", "torch.storage\n_load_from_bytes"])
def test_what_no_tensor_needs_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="which no tensor needs"):
        tensor_files.read_torch_archive(saved(tmp_path, f"c{name}\n".encode() + b"(" + text("true") + b"tR"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (tensor((2, 4), (4, 1)), "larger than its storage"),
        (tensor((2,), (3, 1)), "do not fit"),
        (tensor((6,), (1,), size=7), "not as long"),
        (tensor((6,), (1,), key="9"), "data/9"),
        (b"(" + text("module") + text("x") + b"K\x00K\x00K\x00tQ", "no storage"),
    ],
)
def test_tensors_that_are_not_there_are_refused(tmp_path: Path, value: bytes, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        tensor_files.read_torch_archive(saved(tmp_path, value))


def test_what_is_no_archive_of_torch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ModelError, match=r"a\.pt cannot be read"):
        tensor_files.read_torch_archive(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("else", b"")
    with pytest.raises(ModelError, match=r"no data\.pkl"):
        tensor_files.read_torch_archive(file)


def group(name: str, rows: int) -> list[NamedTensor]:
    values = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    return [
        NamedTensor(f"{name}.weight", values.astype(np.uint32)),
        NamedTensor(f"{name}.scales", values.astype(np.float16)),
    ]


def names(groups: list[list[NamedTensor]]) -> list[str]:
    return [tensor.name for group in groups for tensor in group]


def test_what_is_written_is_read_back_by_safetensors(tmp_path: Path) -> None:
    groups = [group("a", 3), group("b", 5)]
    write_safetensors(tmp_path, groups, names(groups))
    read = load_file(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    for tensor in (tensor for group in groups for tensor in group):
        assert read[tensor.name].dtype == tensor.array.dtype
        np.testing.assert_array_equal(read[tensor.name], tensor.array)


def test_mlx_reads_the_file_including_bfloat16(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    values = np.array([[1.0, -2.5, 0.15625]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_safetensors(tmp_path, [[NamedTensor("a", bits, bfloat16=True)]], ["a"])
    read = mx.load(str(tmp_path / "model.safetensors"))["a"]
    assert read.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(read.astype(mx.float32)), values)


def test_a_large_model_is_written_in_parts_that_an_index_lists(tmp_path: Path) -> None:
    groups = [group(f"layer{number}", 16) for number in range(5)]
    write_safetensors(tmp_path, groups, names(groups), shard_bytes=2000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    parts = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert parts == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name, part in index["weight_map"].items():
        with safe_open(tmp_path / part, "numpy") as file:
            assert name in file.keys()  # noqa: SIM118
    assert sorted(index["weight_map"]) == sorted(names(groups))


def test_tensors_that_belong_together_stay_in_one_part(tmp_path: Path) -> None:
    groups = [group("a", 16), group("b", 16)]
    write_safetensors(tmp_path, groups, names(groups), shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["a.weight"] == index["a.scales"] != index["b.weight"] == index["b.scales"]

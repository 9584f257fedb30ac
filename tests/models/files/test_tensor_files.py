"""Files that torch saved, read without torch and without running what is in them."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import ModelError
from ingot.models.files import torch_archive

NUMBERS = np.arange(6, dtype=np.float16)


def text(said: str) -> bytes:
    return b"X" + struct.pack("<I", len(said)) + said.encode()


def pair(*numbers: int) -> bytes:
    return b"(" + b"".join(b"M" + struct.pack("<H", number) for number in numbers) + b"t"


def tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, size: int = 6, key: str = "0"
) -> bytes:
    """How torch pickles one."""
    storage = b"(" + text("storage") + b"ctorch\nHalfStorage\n" + text(key) + text("cpu") + b"K" + bytes([size]) + b"tQ"
    told = storage + b"K" + bytes([offset]) + pair(*shape) + pair(*strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + told + b"tR"


def saved(folder: Path, value: bytes, numbers: np.ndarray = NUMBERS) -> Path:
    file = folder / "a.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + text("w") + value + b"s.")
        archive.writestr("archive/data/0", numbers.tobytes())
    return file


def test_a_tensor_is_read_as_it_lies(tmp_path: Path) -> None:
    read = torch_archive.read(saved(tmp_path, tensor((2, 3), (3, 1))))
    assert read["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and read["w"].dtype == np.float16


def test_a_transposed_tensor_and_part_of_a_storage_are_read_too(tmp_path: Path) -> None:
    assert torch_archive.read(saved(tmp_path, tensor((3, 2), (1, 3))))["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch_archive.read(saved(tmp_path, tensor((2,), (2,), offset=1)))["w"].tolist() == [1, 3]


@pytest.mark.parametrize("name", ["os\nsystem", "builtins\neval", "torch\nload", "torch.storage\n_load_from_bytes"])
def test_what_no_tensor_needs_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="which no tensor needs"):
        torch_archive.read(saved(tmp_path, f"c{name}\n".encode() + b"(" + text("true") + b"tR"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (tensor((2, 4), (4, 1)), "larger than what it lies in"),
        (tensor((2,), (3, 1)), "do not fit"),
        (tensor((6,), (1,), size=7), "not as long"),
        (tensor((6,), (1,), key="9"), "data/9"),
        (b"(" + text("module") + text("x") + b"K\x00K\x00K\x00tQ", "no storage"),
    ],
)
def test_tensors_that_are_not_there_are_refused(tmp_path: Path, value: bytes, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        torch_archive.read(saved(tmp_path, value))


def test_what_is_no_archive_of_torch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ModelError, match=r"a\.pt cannot be read"):
        torch_archive.read(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("else", b"")
    with pytest.raises(ModelError, match=r"no data\.pkl"):
        torch_archive.read(file)

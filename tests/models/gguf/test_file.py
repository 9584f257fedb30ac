import struct
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import ModelError
from ingot.models.gguf.file import GGUFFile
from tests.models.gguf.making import tiny_model


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tiny_model("llama", kinds=[Kind.Q8_0], layers=1).write(path).read_bytes()


def opened(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_metadata_and_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    model = tiny_model("llama", kinds=[Kind.F16, Kind.Q4_K], layers=1)
    with GGUFFile(model.write(tmp_path / "tiny.gguf")) as file:
        for key, value in model.metadata.items():
            assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key
        assert file.tensors.keys() == model.tensors.keys()
        for name, (kind, shape, raw) in model.tensors.items():
            entry = file.tensors[name]
            assert (entry.type, entry.shape) == (kind, shape)
            rows = 1 if len(shape) == 1 else shape[0]
            np.testing.assert_array_equal(file.rows(entry, 0, rows), raw.view(np.uint8).reshape(rows, -1))


def test_rows_can_be_read_one_range_at_a_time(tmp_path: Path, sample: bytes) -> None:
    with opened(tmp_path, sample) as file:
        entry = file.tensors["blk.0.ffn_up.weight"]
        whole = file.rows(entry, 0, entry.shape[0])
        np.testing.assert_array_equal(file.rows(entry, 7, 11), whole[7:11])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for content, reason in (
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    ):
        with pytest.raises(ModelError, match=reason):
            opened(tmp_path, content)


def test_a_tensor_of_a_type_that_nobody_knows_is_named(tmp_path: Path, sample: bytes) -> None:
    name = b"blk.0.ffn_up.weight"
    place = sample.index(name) + len(name) + 4 + 16  # behind the number of dimensions and the two of them
    with (
        opened(tmp_path, sample[:place] + struct.pack("<I", 4711) + sample[place + 4 :]) as file,
        pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has the unknown type number 4711"),
    ):
        _ = file.tensors["blk.0.ffn_up.weight"].type


def test_a_tensor_beyond_the_end_of_a_half_fetched_file_is_named(tmp_path: Path, sample: bytes) -> None:
    with (
        opened(tmp_path, sample[:-1000]) as file,
        pytest.raises(ModelError, match=r"'blk\..*' lies beyond the end of model\.gguf"),
    ):
        for entry in file.tensors.values():
            file.check_bounds(entry)


@given(data=st.data())
def test_a_header_cut_anywhere_is_refused(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    with opened(folder, sample) as file:
        end = len(file.header())
    with pytest.raises(ModelError):
        opened(folder, sample[: data.draw(st.integers(0, end - 64))])


def test_an_absurd_length_is_refused_before_anything_of_it_is_made(tmp_path: Path) -> None:
    huge = struct.pack("<Q", 1 << 62)
    for content in (
        b"GGUF" + struct.pack("<IQ", 3, 0) + huge,  # keys
        b"GGUF" + struct.pack("<I", 3) + huge + bytes(8),  # tensors
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + huge + bytes(16),  # the length of a key
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<II", 9, 4) + huge,  # an array
    ):
        with pytest.raises(ModelError, match="cut short or damaged"):
            opened(tmp_path, content)

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ingot.errors import ModelError
from ingot.models.files.gguf_files import gguf_part_name, gguf_parts_of
from ingot.models.files.progress import no_progress
from ingot.models.gguf.file import GGUFFile, GGUFModel
from ingot.models.gguf.importer import convert_gguf
from tests.models.gguf.making import TinyModel, tiny_model


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
            np.testing.assert_array_equal(entry.rows(0, rows), raw.view(np.uint8).reshape(rows, -1))


def test_rows_can_be_read_one_range_at_a_time(tmp_path: Path, sample: bytes) -> None:
    with opened(tmp_path, sample) as file:
        entry = file.tensors["blk.0.ffn_up.weight"]
        whole = entry.rows(0, entry.shape[0])
        np.testing.assert_array_equal(entry.rows(7, 11), whole[7:11])


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
    offset = sample.index(name) + len(name) + 4 + 16  # behind the number of dimensions and the two of them
    with (
        opened(tmp_path, sample[:offset] + struct.pack("<I", 4711) + sample[offset + 4 :]) as file,
        pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' has the unknown type number 4711"),
    ):
        _ = file.tensors["blk.0.ffn_up.weight"].type


def test_a_tensor_beyond_the_end_of_a_half_fetched_file_is_named(tmp_path: Path, sample: bytes) -> None:
    with (
        opened(tmp_path, sample[:-1000]) as file,
        pytest.raises(ModelError, match=r"'blk\..*' lies beyond the end of model\.gguf"),
    ):
        for entry in file.tensors.values():
            entry.check_bounds()


@given(data=st.data())
def test_a_header_cut_anywhere_is_refused(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    with opened(folder, sample) as file:
        end = file.data_offset
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


COUNT = 3


def split(model: TinyModel, folder: Path, stem: str = "tiny") -> list[Path]:
    """The parts of a model as llama.cpp's splitter writes them: all metadata in the first, some tensors in each."""
    names = list(model.tensors)
    paths = []
    for number in range(COUNT):
        split_metadata = {"split.no": number, "split.count": COUNT, "split.tensors.count": len(names)}
        metadata = model.metadata if number == 0 else {"general.architecture": model.metadata["general.architecture"]}
        part = TinyModel(metadata | split_metadata, {name: model.tensors[name] for name in names[number::COUNT]})
        paths.append(part.write(folder / f"{stem}-{number + 1:05}-of-{COUNT:05}.gguf"))
    return paths


def weights_of(source: Path, target: Path) -> dict[str, np.ndarray]:
    target.mkdir()
    convert_gguf(source, target, no_progress)
    return load_file(target / "model.safetensors")


def test_any_part_leads_to_the_whole_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    expected = weights_of(model.write(tmp_path / "whole.gguf"), tmp_path / "whole")
    for number, part in enumerate(split(model, tmp_path)):
        found = weights_of(part, tmp_path / f"from-{number}")
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first, second, third = split(tiny_model("llama"), tmp_path)
    second.unlink()
    with pytest.raises(
        ModelError, match=r"one of 3 parts, of which these are missing in its folder: tiny-00002-of-00003"
    ):
        GGUFModel(third)
    third.unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003.gguf, tiny-00003-of-00003.gguf"):
        GGUFModel(first)


def test_of_many_missing_parts_only_some_are_named(tmp_path: Path) -> None:
    lonely = tmp_path / "big-00001-of-00400.gguf"
    lonely.touch()
    with pytest.raises(ModelError, match=r"big-00009-of-00400\.gguf and 391 more$"):
        gguf_parts_of(lonely)


def test_parts_that_were_renamed_or_mixed_up_are_refused(tmp_path: Path) -> None:
    first, second, third = split(tiny_model("llama"), tmp_path)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"one of 3 parts by its split\.count.* as in NAME-00001-of-00003\.gguf"):
        GGUFModel(alone)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003.gguf holds another part than its name says"):
        GGUFModel(first)
    second.write_bytes(content)
    third.write_bytes(content)
    with pytest.raises(ModelError, match=r"holds another part than its name says: its split.no is 1"):
        GGUFModel(first)


def test_parts_of_unlike_splits_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    parts = split(tiny_model("llama"), tmp_path)
    turned = tiny_model("llama")
    name, tensor = next(iter(turned.tensors.items()))
    del turned.tensors[name]
    turned.tensors[name] = tensor
    parts[1].write_bytes(split(turned, other)[1].read_bytes())
    with pytest.raises(ModelError, match=r"both hold the tensor"):
        GGUFModel(parts[0])


def test_parts_that_hold_fewer_tensors_than_they_say_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    parts = split(model, tmp_path)
    split_metadata = {"general.architecture": "llama", "split.no": 2, "split.count": COUNT}
    TinyModel(split_metadata, dict(list(model.tensors.items())[2:3])).write(parts[2])
    with pytest.raises(ModelError, match=f"not {len(model.tensors)} as they state"):
        GGUFModel(parts[0])


def test_a_part_that_is_cut_short_is_named(tmp_path: Path) -> None:
    parts = split(tiny_model("llama"), tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-1000])
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match=r"lies beyond the end of tiny-00003-of-00003\.gguf"):
        convert_gguf(parts[0], tmp_path / "made", no_progress)


@given(stem=st.text(min_size=1, max_size=20), number=st.integers(1, 99999), count=st.integers(1, 99999))
def test_names_of_parts_say_which_of_how_many(stem: str, number: int, count: int) -> None:
    part = gguf_part_name(f"{stem}-{number:05}-of-{count:05}.gguf")
    if "\n" not in stem:
        assert part is not None
        assert (part.stem, part.number, part.count) == (stem, number, count)
    assert gguf_part_name(f"{stem}.gguf") is None or "-of-" in stem


@pytest.mark.parametrize("name", ["model.gguf", "a-1-of-3.gguf", "-00001-of-00003.gguf", "a-00001-of-00003.bin"])
def test_other_names_say_nothing_of_parts(name: str) -> None:
    assert gguf_part_name(name) is None


def test_a_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="part 4 of 3"):
        gguf_parts_of(tmp_path / "a-00004-of-00003.gguf")

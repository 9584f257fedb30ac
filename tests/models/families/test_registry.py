"""The families' descriptions: all in one folder, and none of what mlx-lm does not have."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import pytest

from ingot.models import families
from ingot.models.families import registry
from ingot.models.families.description import (
    AttentionSpec,
    GatedDeltaSpec,
    Mamba2Spec,
    MlpSpec,
    ModelFamily,
    NormSpec,
    two_blocks,
)
from ingot.models.families.registry import MLX_VLM_FAMILIES, MODEL_FAMILIES, index_families
from tests.models.layers import family_configs

MODELS = Path(families.__file__).parents[1]
FOLDER = MODELS / "families"
FILES = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("__init__", "description", "registry")]
OTHERS = [path for path in sorted(MODELS.glob("**/*.py")) if not path.is_relative_to(FOLDER)]
THEIRS = {
    "sentence_transformers.py": {"Transformer"},
    "packaged.py": {"gpt2"},
    "loading.py": {"MLP"},
    "mlp.py": {"MLP"},
    "locate.py": {"Model"},
    "assistant.py": {"gemma4_text"},
    "block.py": {"gemma4_text", "qwen3"},
}
"""What other projects call something, too: sentence-transformers its modules, OpenAI a vocabulary, mlx-vlm towers',
transformers its models without a head; an MLP is one wherever it is named. And the families whose layers drafters have
that are no models by themselves."""
SHARED = ("mlp",)
"""Modules that packages of mlx-vlm's share. The others' modules are in packages."""
CLASSES = [
    *((f"mlx_lm.models.{family.name}", name) for family in MODEL_FAMILIES.values() for name in sorted(family.classes)),
    *(
        (f"mlx_vlm.models.{family.name}{'' if family.name in SHARED else '.language'}", name)
        for family in MLX_VLM_FAMILIES.values()
        for name in sorted(family.classes)
    ),
]
"""By their modules."""


@cache
def upstream_names() -> tuple[set[str], set[str]]:
    """The families of mlx-lm's and the classes in them, read from its sources."""
    files = family_configs.upstream_files()
    trees = [ast.parse(path.read_text()) for path in files]
    return {path.stem for path in files}, {
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }


def words(path: Path) -> Iterator[str]:
    """Of all strings in a file that are not prose."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from re.split(r"[^\w-]+", node.value)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(MODELS)))
def test_no_other_file_names_a_family_or_a_class_of_mlx_lms(path: Path) -> None:
    names, classes = upstream_names()
    # A GGUF file's architecture says which family's config is written, a checkpoint's type which tower it has.
    known = classes if path.parent.name in ("gguf", "vision") else names | classes
    assert not known.intersection(words(path)) - THEIRS.get(path.name, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_familys_file_is_data_alone(path: Path) -> None:
    imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) for node in imported}
    others = {f"ingot.models.families.{each.stem}" for each in FILES}  # what several families share
    assert modules - others == {"__future__", "ingot.models.families.description"}


@pytest.mark.parametrize(
    "described",
    [
        (ModelFamily("llama"), ModelFamily("qwen2"), ModelFamily("llama")),
        (ModelFamily("llama", text_only=("small",)), ModelFamily("small")),
        (ModelFamily("llama", text_only=("small",)), ModelFamily("qwen2", text_only=("small",))),
    ],
)
def test_a_family_described_twice_is_refused(described: tuple[ModelFamily, ...]) -> None:
    with pytest.raises(ValueError, match=r"(llama|small) is described twice"):
        index_families(described)


@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_every_family_is_one_of_mlx_lms_and_something_is_said_of_it(name: str) -> None:
    assert name in upstream_names()[0]
    assert MODEL_FAMILIES[name] != ModelFamily(name)


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_every_class_is_defined_where_it_is_described(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    assert issubclass(kind, nn.Module)
    assert kind.__module__ == module, "described where it is not defined: never found"


def test_a_module_is_looked_up_by_its_own_class() -> None:
    def of(name: str, package: str = registry.MLX_LM_MODELS) -> object:
        family, kind = name.split(".")
        return type(kind, (), {"__module__": f"{package}.{family}"})()

    assert registry.attention_spec_of(of("phi3.Attention")) == AttentionSpec(joint="qkv_proj")
    assert registry.mlp_spec_of(of("gemma.MLP")) == MlpSpec(act="gelu")
    assert registry.recurrence_spec_of(of("qwen3_5.GatedDeltaNet")) == GatedDeltaSpec()
    assert registry.recurrence_spec_of(of("mamba2.Mamba2Block")) == Mamba2Spec()
    assert registry.norm_spec_of(of("gemma2.RMSNorm")) == NormSpec("rms", one_more=True)
    assert registry.layer_spec_of(of("granite.TransformerBlock")) == two_blocks(multiplier="residual_multiplier")
    assert registry.layer_spec_of(of("llama.Attention")) is None
    assert registry.attention_spec_of(of("llama.MLP")) is None
    assert registry.attention_spec_of(of("unheard_of.Attention")) is None
    assert registry.attention_spec_of(of("llama.Attention", "somebody.elses")) is None
    assert registry.attention_spec_of(SimpleNamespace()) is None


def test_what_a_whole_model_is_told_by_is_looked_up_by_its_type() -> None:
    assert registry.family_of_type("phi3small").refused is not None
    assert registry.family_of_type("minimax_m3_vl").unmixed is not None
    assert registry.family_of_type("unheard_of").refused is None
    assert registry.multimodal_type_of("qwen3_5_text") == "qwen3_5"
    assert registry.multimodal_type_of("qwen3_5") is None


@cache
def built() -> set[tuple[str, str]]:
    """The classes of all tiny models, by module and name."""
    loadable = (family_configs.FAMILIES | family_configs.VLM_FAMILIES).keys() - family_configs.UNLOADABLE
    models = [family_configs.skeleton(name) for name in loadable]
    kinds = {type(module) for model in models for _, module in model.named_modules()}
    return {(kind.__module__, kind.__name__) for kind in kinds}


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_every_class_is_in_a_tiny_model_by_which_its_description_is_tested(module: str, name: str) -> None:
    assert (module, name) in built()

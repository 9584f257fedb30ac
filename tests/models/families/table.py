"""docs/families-table.md, from the registries and tiny models: what each family runs on, sees, drafts and calls.

python -m tests.models.families.table          writes the page
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ingot.models import gguf
from ingot.models.families.description import ScanSpec
from ingot.models.families.registry import attention_spec_of, mtp_spec_of, recurrence_spec_of
from ingot.models.layers.indexer import has_indexer
from ingot.models.layers.layer_program import decoder_layers_of, layer_program_of
from ingot.models.layers.swapping import find_mixers, unknown_mixers
from ingot.models.vision.loading import VISION_FAMILIES
from ingot.text.tool_formats.registry import FORMATS
from tests.models.layers import family_configs
from tests.models.layers.family_configs import FAMILIES, UNLOADABLE, VLM_FAMILIES
from tests.models.layers.test_families import NEEDS_METAL, REFUSED, UNMIXED

PAGE = Path(__file__).parents[3] / "docs/families-table.md"
INTRODUCTION = """# All families

What the `model_type` of a `config.json` means here. `python -m tests.models.families.table` writes this page from the
tables that models are loaded by, and a test compares it with them.

- **CPU, Metal, CUDA.** *fast*: attention and recurrent layers are ingot's own, and sequences of any length share a
  pass. *graph*: all layers are described as parts of a decode graph, too. *parts*: some layers run the library's own
  mixers, sequence by sequence where these need it, and all else for every sequence of a pass at once. *in turn*:
  sequences that differ, or all, run one after another. *no*: refused. The ready line has the reasons, and what kernels
  lack for a model's own sizes and formats.
- **Vision.** Images are understood, with the extra `vision`. Families that are here for their tower run as their
  language model does.
- **Draft head.** One in a checkpoint is found and used.
- **Tools.** The format of calls that is assumed where a chat template shows none; else the template says it, whatever
  the family.
- **GGUF.** Files of its architecture are read.

Families that mlx-lm lacks run by the language part of mlx-vlm, which comes with the extra `vision`.

"""
HEADER = ("family", "CPU", "Metal", "CUDA", "vision", "draft head", "tools", "GGUF")


@cache
def rows() -> tuple[tuple[str, ...], ...]:
    return tuple(_rows())


def _rows() -> Iterator[tuple[str, ...]]:
    seen = set(VISION_FAMILIES)
    by_type: dict[str, list[str]] = {}
    for name in (*FAMILIES, *VLM_FAMILIES):
        by_type.setdefault(str(family_configs.config(name)["model_type"]), []).append(name)
    for kind in sorted({*by_type, *seen}, key=lambda kind: (kind.lower(), kind)):
        speeds = _speeds(by_type[kind]) if kind in by_type else ("as its language model",) * 3
        tools = next((form.name for form in FORMATS if kind in form.model_types), "")
        yield (
            f"`{kind}`",
            *speeds,
            _yes(kind in VISION_FAMILIES),
            _yes(mtp_spec_of(kind) is not None),
            tools,
            _yes(_is_read_from_gguf(kind)),
        )


def _yes(true: bool) -> str:
    return "yes" if true else ""


def _speeds(names: list[str]) -> tuple[str, str, str]:
    """On a CPU, on Metal and on CUDA, by the first of a family's tiny models."""
    name = names[0]
    if name in REFUSED or name in UNLOADABLE:
        return "no", "no", "no"
    model = family_configs.skeleton(name)
    own_mixers = bool(unknown_mixers(model) or not find_mixers(model))
    if name in UNMIXED:
        speed = "in turn"
    else:
        speed = "parts" if own_mixers and not _is_recurrent(model) else "fast"
    if name in NEEDS_METAL:
        return "no", speed, "no"
    layers = decoder_layers_of(model)
    by_operations = any(
        isinstance(recurrence_spec_of(module), ScanSpec)
        or ((spec := attention_spec_of(module)) is not None and has_indexer(module, spec.indexer))
        for module in model.modules()
    )
    is_graph = speed == "fast" and bool(layers) and all(layer_program_of(layer) is not None for layer in layers)
    is_graph = is_graph and not by_operations
    return speed, speed, "graph" if is_graph else speed


def _is_recurrent(model: Any) -> bool:
    """Whether it has no attention, and its recurrent mixers are known."""
    return not unknown_mixers(model) and not any("attn" in path for path, _ in model.named_modules())


@cache
def _named_by_gguf() -> tuple[set[str], set[str]]:
    """The words in the descriptions of GGUF's architectures, and the beginnings of words that end in a number."""
    words, beginnings = set[str](), set[str]()
    for file in Path(gguf.__file__).parent.glob("*architectures*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and isinstance(node.values[0], ast.Constant):
                beginnings.add(str(node.values[0].value))
    return words, beginnings


def _is_read_from_gguf(family: str) -> bool:
    """Whether files are read as such models."""
    words, beginnings = _named_by_gguf()
    numbered = re.fullmatch(r"(\w+_v)\d", family)
    return family in words or bool(numbered and numbered[1] in beginnings)


def page() -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{INTRODUCTION}{table}\n"


if __name__ == "__main__":
    PAGE.write_text(page())

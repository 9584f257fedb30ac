"""What of a loaded model is slower than it could be, in words for who started it."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from ingot.kernels.checked import CheckedKernels
from ingot.models.files.config_names import older_names
from ingot.models.heads.headless import classes_in
from ingot.models.layers.decode_graph import Stack
from ingot.models.layers.lm_head import Selection
from ingot.models.layers.mixers import unknown_mixers
from ingot.models.probe import Findings
from ingot.upstream import load_config, load_model


def remarks(
    model: nn.Module,
    selection: Selection | None,
    found: Findings,
    kernels: CheckedKernels | None,
    stack: Stack | None,
) -> list[str]:
    """What is slower than it could be, or not sure to be right."""
    said = [] if kernels is None else _unused(kernels)
    said += foreign_attention(model)
    if found.wrong is not None:
        said.append(f"{found.wrong}, more than rounding alone moves them: check what it says")
    if stack is not None and stack.refused is not None:
        said.append(f"layers launch by launch, slower: as one graph {stack.refused}")
    elif stack is not None and stack.slower is not None:
        said.append(stack.slower)
    if selection is None or not selection.obeyed:
        said.append("logits are computed for whole prompts: the output head of this family is not known")
    why = "" if found.unmixed is None else f" ({found.unmixed})"
    if found.moved:
        said.append(
            f"sequences run one after another: rounding alone moves this model's answers by {found.moved:.2g} of their "
            "range, so that whether mixing them is right cannot be told"
        )
    elif not found.mixed and not found.ragged:
        said.append(f"sequences run one after another: this family's code cannot mix them{why}")
    elif not found.mixed:
        said.append(f"prompts and answers are computed one after another: this family's code cannot mix them{why}")
    return said


def foreign_attention(model: nn.Module) -> list[str]:
    """That attention is mlx-lm's own, and what that costs: of a model whose modules were swapped or will be."""
    classes = unknown_mixers(model)
    if not classes:
        return []
    return [
        f"attention by mlx-lm's own modules ({', '.join(classes)}), slower: each step copies keys and values out of "
        "their pages, sequences that differ in length attend one after another, and long prompts take more memory"
    ]


def remarks_ahead(folder: Path) -> list[str]:
    """What is known to be slower of the model in a folder, none of whose weights are read."""
    stated = load_config(folder)
    classes = classes_in(folder, stated)
    return foreign_attention(load_model(folder, model_config=older_names(stated), get_model_classes=classes)[0])


def _unused(kernels: CheckedKernels) -> list[str]:
    """What runs without kernels of ours, and why."""
    reasons = {
        "attention over gathered pages, slower: a kernel": kernels.wrong.values(),
        "rotary positions by plain operations, slower: a kernel": [why for why in kernels.wrong_turns.values() if why],
        "packed weights by MLX's own products, slower:": kernels.packed.wrong.values(),
        "plain weights by MLX's own products, in other bits among other rows:": kernels.dense.wrong.values(),
        "gated delta token by token, slower:": kernels.delta.wrong.values(),
    }
    return [f"{what} {why}" for what, all_of_them in reasons.items() for why in sorted({*all_of_them})]

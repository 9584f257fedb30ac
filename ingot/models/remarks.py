"""What of a loaded model is slower than it could be, in words for who started it."""

from __future__ import annotations

from ingot.kernels.paged.checked import CheckedKernels
from ingot.models.layers.captured import Stack
from ingot.models.layers.selection import Selection
from ingot.models.probe import Findings


def remarks(
    selection: Selection | None, found: Findings, kernels: CheckedKernels | None, stack: Stack | None
) -> list[str]:
    """What is slower than it could be."""
    said = [] if kernels is None else _unused(kernels)
    if stack is not None and stack.refused is not None:
        said.append(f"layers launch by launch, slower: as one graph {stack.refused}")
    elif stack is not None and stack.slower is not None:
        said.append(stack.slower)
    if selection is None or not selection.obeyed:
        said.append("logits are computed for whole prompts: the output head of this family is not known")
    if not found.mixed and not found.ragged:
        said.append("sequences run one after another: this family's code cannot mix them")
    elif not found.mixed:
        said.append("prompts and answers are computed one after another: this family's code cannot mix them")
    return said


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

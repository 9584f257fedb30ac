"""A report on a loaded model: its memory footprint, and notes on what is slower than it could be.

Both come from the model's KV states and modules after the probe. The memory budget is computed from the footprint; the
notes are shown to whoever started the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.footprint import NO_GATHER_COST, Footprint, GatherCost
from ingot.cache.own_caches import OwnCacheState
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.files.model_config import older_config_names
from ingot.models.layers.attention import QUERY_TILE, MixedAttention
from ingot.models.layers.attention_setup import gathers_pages
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of
from ingot.models.layers.fused_layers import LayerStandIn
from ingot.models.layers.gpu_linear import (
    DenseKernelEmbedding,
    DenseKernelLinear,
    QuantizedKernelEmbedding,
    QuantizedKernelLinear,
)
from ingot.models.layers.graph_layers import why_uncovered
from ingot.models.layers.lm_head import LogitsSelection, lm_head_of
from ingot.models.layers.mlp import DenseSwitchLinear, PackedSwitchLinear
from ingot.models.layers.modules import DenseEmbedding, DenseLinear, PackedEmbedding, PackedLinear, own_class
from ingot.models.layers.norms import NativeLayerNorm, NativeRMSNorm
from ingot.models.layers.recurrent import NativeRecurrence
from ingot.models.layers.swapping import find_mixers, is_tiled, unknown_mixers
from ingot.models.precision import main_dtype
from ingot.models.probe import ProbeFindings
from ingot.upstream import load_config, load_model


def footprint_of(
    model: nn.Module,
    config: dict[str, Any],
    found: ProbeFindings,
    device: Device,
    kernels: CheckedKernels | None,
    *,
    fused: bool,
    growth: int | None = None,
) -> Footprint:
    """Of a model as it was probed. `fused`: its layers are one operation; `growth`: bytes of a token in caches that are
    the model's own."""
    groups = tuple(
        (group.window, group.page_bytes // PAGE if growth is None else growth) for group in found.rows.groups
    )
    text = {**config, **(config.get("text_config") or {})}
    hidden = int(text.get("hidden_size") or text.get("d_model") or text.get("n_embd") or 4096)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    stated = text.get("intermediate_size") or 4 * hidden
    inner = max(map(int, stated if isinstance(stated, list) else [stated]))  # Gemma 3n has one for each layer
    return Footprint(
        groups=groups,
        recurrent=found.rows.slot_bytes,
        activation=4 * (12 * hidden + 4 * inner),
        # Scores, their mask and their softmax, alive together for one layer.
        score=4 * 3 * heads if device.unfused_attention and not fused else 0,
        logits=4 * found.vocab,
        scratch=0 if kernels is None or kernels.packed.scratch is None else kernels.packed.scratch.nbytes,
        tile=QUERY_TILE if found.mixed and is_tiled(model) else None,
        gathered=NO_GATHER_COST if fused else _gathered_pages(model, found),
    )


def _gathered_pages(model: nn.Module, found: ProbeFindings) -> GatherCost:
    """What gathering pages for attention takes; windows gather few where other layers see everything."""
    states = [state for state in found.rows.states if isinstance(state, AppendState) and state.storage is not None]
    few, many = gathers_pages(model, len(states)) if found.mixed else (True, True)
    long = [state for state in states if state.window is None] or states
    each = max((state.stored.token_bytes for state in long), default=0)
    return GatherCost(each if few else 0, each if many else 0, MOST_QUERIES)


def model_notes(
    model: nn.Module,
    selection: LogitsSelection | None,
    found: ProbeFindings,
    kernels: CheckedKernels | None,
    stack: DecodeGraphs | None,
    uncovered: str | None,
) -> list[str]:
    """What is slower than it could be, or may be incorrect. `uncovered`: the part of its layers without which they
    cannot be graphs."""
    notes = [] if kernels is None else _unused_kernel_notes(kernels)
    own_caches = any(isinstance(state, OwnCacheState) for state in found.rows.states)
    if own_caches and found.mixed:
        notes.append(
            f"attention by the family's own modules ({', '.join(unknown_mixers(model))}), slower: these have caches of "
            "one sequence each, and attend one after another"
        )
    elif not own_caches:
        notes += mlx_lm_attention_notes(model)
    if found.wrong is not None:
        notes.append(f"{found.wrong}, more than rounding alone moves them: check its answers")
    if stack is not None and stack.refusal is not None:
        notes.append(f"layers run kernel by kernel, slower: as one graph {stack.refusal}")
    elif uncovered is not None:
        notes.append(f"layers run kernel by kernel, slower: a graph has no kernels for {uncovered}")
    elif stack is not None and stack.slower is not None:
        notes.append(stack.slower)
    if selection is None or not selection.was_used:
        notes.append("logits are computed for whole prompts: the output head of this family is not known")
    why = "" if found.unmixed is None else f" ({found.unmixed})"
    if found.rounding:
        notes.append(
            f"sequences run one after another: rounding alone moves this model's logits by {found.rounding:.2g} of "
            "their range, so that it cannot be checked whether sequences can be mixed"
        )
    elif not found.mixed and not found.ragged:
        notes.append(f"sequences run one after another: this family's code cannot mix them{why}")
    elif not found.mixed and found.ragged:
        notes.append(f"prompts and answers are computed one after another: this family's code cannot mix them{why}")
    return notes


def irreproducible_part(model: Any) -> str | None:
    """Which part of a model may give a token other bits among other tokens, though its prompts are to be graphs; None
    where none does."""
    stack, head = decode_graphs_of(model), lm_head_of(model)
    if stack is None:
        return why_uncovered(model) or "its layers, which are computed one by one"
    if stack.lost_bits is not None:
        return stack.lost_bits
    if not stack.covers_prompts:
        return f"its layers, as graphs {stack.refusal}" if stack.refusal else stack.lacking
    kinds = (DenseKernelLinear, DenseKernelEmbedding, QuantizedKernelLinear, QuantizedKernelEmbedding)
    return None if isinstance(head, kinds) else "its output head"


def mlx_lm_attention_notes(model: nn.Module) -> list[str]:
    """That attention is mlx-lm's own, and what that costs, for a model whose modules were swapped or will be."""
    classes = unknown_mixers(model)
    if not classes:
        return []
    return [
        f"attention by the family's own modules ({', '.join(classes)}), slower: each step copies keys and values out "
        "of their pages, sequences that differ in length attend one after another, and long prompts take more memory"
    ]


def model_notes_before_loading(folder: Path) -> list[str]:
    """Notes on the model in a folder, without reading its weights."""
    stated = load_config(folder)
    classes = model_classes_for(folder, stated)
    return mlx_lm_attention_notes(
        load_model(folder, model_config=older_config_names(stated), get_model_classes=classes)[0]
    )


_IN_FIXED_ORDER = (
    *(DenseLinear, PackedLinear, DenseEmbedding, PackedEmbedding, DenseSwitchLinear, PackedSwitchLinear),
    *(NativeRMSNorm, NativeLayerNorm),
)


def parts_without_fixed_order(model: nn.Module) -> list[str]:
    """The classes of modules that native kernels do not compute on CPUs, of a model whose modules were swapped: the
    last bits of what MLX's own products and mlx-lm's own mixers give may depend on how many tokens are computed
    together. Empty if every row is computed the same way."""
    if main_dtype(model) != mx.float32:
        return [type(model).__name__]  # native norms, gates and attention are for float32
    every = dict(model.named_modules())
    whole = {path for path, module in every.items() if isinstance(module, LayerStandIn)}
    recurrent = {path for path, module in every.items() if isinstance(module, NativeRecurrence)}
    # Of recurrent layers, projections may be left to modules.
    inside = whole | {path for path in recurrent if every[path]._weights is not None}
    mixers = {path: module for path, module in find_mixers(model) if not _is_within(path, inside | recurrent)}
    wrong = [module for module in mixers.values() if not _attends_in_fixed_order(module)]
    for path, module in every.items():
        if _is_within(path, inside) or isinstance(module, _IN_FIXED_ORDER):
            continue
        if _is_within(path, recurrent):
            own = isinstance(module, nn.Linear | nn.QuantizedLinear)
        else:
            own = "Norm" in own_class(module).__name__ or _owns_matrices(module)
        wrong += [module] if own else []
    return sorted({own_class(module).__name__ for module in wrong})


def _is_within(path: str, outer: set[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in outer)


def _attends_in_fixed_order(mixer: nn.Module) -> bool:
    return isinstance(mixer, MixedAttention) and mixer.native and mixer.token_indexer is None


def _owns_matrices(module: nn.Module) -> bool:
    """Whether weights of more than one axis are its own, and so multiplied by its own code."""
    return any(
        isinstance(value, mx.array) and value.ndim > 1 and not name.startswith("_") for name, value in module.items()
    )


def _unused_kernel_notes(kernels: CheckedKernels) -> list[str]:
    """What runs without our kernels, and why."""
    reasons = {
        "attention over gathered pages, slower: a kernel": kernels.wrong.values(),
        "rotary positions by plain operations, slower: a kernel": [why for why in kernels.wrong_rope.values() if why],
        "packed weights by MLX's own products, slower:": kernels.packed.wrong.values(),
        "prompts through experts by mlx-lm's own code, slower:": kernels.experts.wrong.values(),
        "plain weights by MLX's own products, in other bits among other rows:": kernels.dense.wrong.values(),
        "recurrent layers by the family's own modules, slower:": kernels.recurrent.wrong.values(),
        "experts by plain operations, slower:": kernels.moe.wrong.values(),
    }
    return [f"{what} {why}" for what, whys in reasons.items() for why in sorted({*whys})]

"""What a model's live states and forward passes take, read off its own states and modules."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.footprint import NOTHING_GATHERED, Footprint, Gathered
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.models.layers.attention import TILE, gathers
from ingot.models.layers.mixers import tiled
from ingot.models.probe import Findings


def footprint_of(
    model: nn.Module,
    config: dict[str, Any],
    found: Findings,
    device: Device,
    kernels: CheckedKernels | None,
    *,
    fused: bool,
) -> Footprint:
    """Of a model as it was probed. `fused`: its layers are one operation."""
    groups = tuple((group.window, group.page_bytes // PAGE) for group in found.rows.groups)
    text = {**config, **(config.get("text_config") or {})}
    hidden = int(text.get("hidden_size") or text.get("d_model") or text.get("n_embd") or 4096)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    inner = int(text.get("intermediate_size") or 4 * hidden)
    return Footprint(
        groups=groups,
        recurrent=found.rows.slot_bytes,
        activation=4 * (12 * hidden + 4 * inner),
        # Scores, their mask and their softmax, alive together for one layer.
        score=4 * 3 * heads if device.unfused_attention and not fused else 0,
        logits=4 * found.vocab,
        scratch=0 if kernels is None or kernels.packed.scratch is None else kernels.packed.scratch.nbytes,
        tile=TILE if found.mixed and tiled(model) else None,
        gathered=NOTHING_GATHERED if fused else _gathered(model, found),
    )


def _gathered(model: nn.Module, found: Findings) -> Gathered:
    """What pages take that are laid one behind another for attention; that of a window is short, where others see
    all."""
    states = [state for state in found.rows.states if isinstance(state, AppendState) and state.storage is not None]
    few, many = gathers(model, len(states)) if found.mixed else (True, True)
    long = [state for state in states if state.window is None] or states
    each = max((state.stored.token_bytes for state in long), default=0)
    return Gathered(each if few else 0, each if many else 0, MOST_QUERIES)

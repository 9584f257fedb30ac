"""Rotary scaling in GGUF files, said as mlx-lm and transformers say it."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.models.gguf.file import TensorEntry
from ingot.models.gguf.hyperparameters import Hyperparameters

FREQS = "rope_freqs.weight"
# The only values that models with this kind of scaling were published with, besides their factor.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def rope_scaling(
    hyper: Hyperparameters, head: int, *, scales_attention: bool = False
) -> tuple[dict[str, Any], frozenset[str]]:
    """What to add to the config, and the tensors that it was read from. Refuses scaling it cannot express.

    `scales_attention`: the model can scale its scores by what the scaling asks for, too.
    """
    kind = hyper.get("rope.scaling.type")
    factor = hyper.number("rope.scaling.factor", hyper.number("rope.scale_linear", 1.0))
    freqs = hyper.file.tensors.get(FREQS)
    if freqs is not None:
        if kind not in (None, "none"):
            raise ModelError(f"the file has both {hyper.architecture}.rope.scaling.type {kind!r} and {FREQS!r}")
        return _llama3(hyper, freqs, head), frozenset({FREQS})
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return {}, frozenset()
    if kind in (None, "linear"):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}, frozenset()
    if kind == "yarn":
        return _yarn(hyper, factor, scales_attention), frozenset()
    raise ModelError(f"{hyper.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")


def _yarn(hyper: Hyperparameters, factor: float, scales_attention: bool) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor"):
        hyper.refuse_unless(f"rope.scaling.{key}", 1.0)
    hyper.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # -1: the usual one
    growth = hyper.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not scales_attention:
        hyper.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0)
    context = hyper.integer("context_length")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": hyper.integer("rope.scaling.original_context_length", context),
        "beta_fast": hyper.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": hyper.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if growth:  # a tenth of what configs say, which is the same for positions and for scores
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(growth * 10, 6))
    return {"rope_scaling": scaling}


def _llama3(hyper: Hyperparameters, entry: TensorEntry, head: int) -> dict[str, Any]:
    """The file has the divisor of each frequency; the models were published with a rule that gives the same."""
    if entry.type != Kind.F32 or entry.shape != (head // 2,):
        raise ModelError(f"tensor {FREQS!r} is {entry.type.name} of shape {list(entry.shape)}, not F32 [{head // 2}]")
    hyper.file.check_bounds(entry)
    divisors = hyper.file.rows(entry, 0, 1).view("<f4")[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return {}
    factor = float(np.max(divisors))
    original = hyper.integer("rope.scaling.original_context_length", LLAMA3_ORIGINAL)
    expected = llama3_divisors(hyper.number("rope.freq_base", 10_000.0), head, factor, original)
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"tensor {FREQS!r} holds a frequency scaling that is not supported")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling}


def llama3_divisors(base: float, head: int, factor: float, original: int) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones left alone, those between blended."""
    turns = original / (2 * np.pi * base ** (np.arange(0, head, 2) / head))
    blend = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)

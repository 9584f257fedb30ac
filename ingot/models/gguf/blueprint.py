"""What a GGUF file must hold for a model: the config that mlx-lm wants, and every tensor with its conversion; and how
files state rotary scaling.

A `Blueprint` is both. Rotary scaling that the configs of mlx-lm and transformers cannot express is refused with
ModelError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.models.gguf.file import Hyperparameters, TensorEntry

ROPE_FREQS = "rope_freqs.weight"
# The only values that models with this kind of scaling were published with, besides their factor.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True, eq=False)
class WantedTensor:
    """A tensor that the architecture needs: its name in the file, its name in the model, and its conversion."""

    source: str
    target: str
    shape: tuple[int, ...]  # in the file; three axes are a matrix for each expert or head
    target_shape: tuple[int, ...]  # in the model
    plain: bool = False  # the model has no quantised form of it
    in_blocks: bool = True  # the model's layer can hold blocks of the K formats
    heads: int = 0  # not 0: each head's rows come in interleaved rotary order and are sorted into halves
    rows: np.ndarray | None = None  # which of the file's rows the model's are, in the model's order
    columns: np.ndarray | None = None  # the same of columns
    convert: Callable[[np.ndarray], np.ndarray] | None = None  # of a vector's numbers
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()  # tensors whose rows come behind the first one's
    join: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None  # makes one of them otherwise

    @property
    def experts(self) -> bool:
        """Whether it is a matrix for each expert."""
        return "_exps." in self.source and len(self.shape) == 3

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]

    def sources(self, there: Collection[str]) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors in a file that holds `there`: older ones have a tensor for each expert."""
        if self.source in there or "_exps." not in self.source:
            return [(self.source, self.shape), *self.further]
        return [(self.source.replace("_exps.", f".{number}."), self.shape[1:]) for number in range(self.shape[0])]


@dataclass(frozen=True, slots=True)
class Blueprint:
    config: dict[str, Any]
    tensors: tuple[WantedTensor, ...]
    spent: frozenset[str]  # tensors that are not written: the config says what they do, or nothing here uses them


def rope_scaling(
    hyper: Hyperparameters, head: int, *, growth: Callable[[float], dict[str, Any]] | None = None
) -> tuple[dict[str, Any], frozenset[str]]:
    """The config's part, and the tensors that it was read from. Refuses scaling that configs cannot express.

    `growth` is what configs call the growth of attention scores with the scale; None: the model cannot do that.
    """
    kind = hyper.get("rope.scaling.type")
    factor = hyper.number("rope.scaling.factor", hyper.number("rope.scale_linear", 1.0))
    freqs = hyper.file.tensors.get(ROPE_FREQS)
    if freqs is not None:
        if kind not in (None, "none"):
            raise ModelError(f"the file has both {hyper.architecture}.rope.scaling.type {kind!r} and {ROPE_FREQS!r}")
        return _llama3_scaling(hyper, freqs, head), frozenset({ROPE_FREQS})
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return {}, frozenset()
    if kind in (None, "linear"):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}, frozenset()
    if kind == "yarn":
        return _yarn_scaling(hyper, factor, growth), frozenset()
    raise ModelError(f"{hyper.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")


def _yarn_scaling(
    hyper: Hyperparameters, factor: float, growth: Callable[[float], dict[str, Any]] | None
) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor"):
        hyper.refuse_unless(f"rope.scaling.{key}", 1.0)
    hyper.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # -1: the usual one
    grown = hyper.number("rope.scaling.yarn_log_multiplier", 0.0)
    if growth is None:
        hyper.refuse_unless("rope.scaling.yarn_log_multiplier", 0.0)
    context = hyper.integer("context_length")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": hyper.integer("rope.scaling.original_context_length", context),
        "beta_fast": hyper.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": hyper.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    return {"rope_scaling": scaling | (growth(grown) if growth is not None and grown else {})}


def _llama3_scaling(hyper: Hyperparameters, entry: TensorEntry, head: int) -> dict[str, Any]:
    """The file has the divisor of each frequency; the published configs have a rule that gives the same."""
    if entry.type != Kind.F32 or entry.shape != (head // 2,):
        raise ModelError(
            f"tensor {ROPE_FREQS!r} is {entry.type.name} of shape {list(entry.shape)}, not F32 [{head // 2}]"
        )
    entry.check_bounds()
    divisors = entry.rows(0, 1).view("<f4")[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return {}
    factor = float(np.max(divisors))
    original = hyper.integer("rope.scaling.original_context_length", LLAMA3_ORIGINAL)
    expected = llama3_divisors(hyper.number("rope.freq_base", 10_000.0), head, factor, original)
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"tensor {ROPE_FREQS!r} holds a frequency scaling that is not supported")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling}


def llama3_divisors(base: float, head: int, factor: float, original: int) -> np.ndarray:
    """Long periods are multiplied by `factor`, short ones are not, those between are interpolated."""
    rotations = original / (2 * np.pi * base ** (np.arange(0, head, 2) / head))
    blend = np.clip((rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)

"""Looks up the description of a module, a class or a model type of mlx-lm's.

The descriptions are tables in the files beside this one, by the first letter of a family's name: `a_to_g`, `h_to_m` and
`n_to_z`; `mlx_vlm` has the families that only mlx-vlm has. A new family is one entry there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ingot.models.families import a_to_g, h_to_m, mlx_vlm, n_to_z
from ingot.models.families.description import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    ModelFamily,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RecurrenceSpec,
    RopeSpec,
)

MLX_LM_MODELS = "mlx_lm.models"
MLX_VLM_MODELS = "mlx_vlm.models"


def index_families(described: Iterable[ModelFamily]) -> Mapping[str, ModelFamily]:
    """Families by name. Raises ValueError where two describe the same models."""
    by_name: dict[str, ModelFamily] = {}
    types: set[str] = set()
    for family in described:
        for model_type in (family.name, *family.text_only):
            if model_type in types:
                raise ValueError(f"the family {model_type} is described twice")
            types.add(model_type)
        by_name[family.name] = family
    return by_name


MODEL_FAMILIES = index_families((*a_to_g.FAMILIES, *h_to_m.FAMILIES, *n_to_z.FAMILIES))
MLX_VLM_FAMILIES = index_families(mlx_vlm.FAMILIES)
"""By the names of mlx-vlm's packages, or of modules that these share."""
_UNKNOWN_FAMILY = ModelFamily("unknown")
_MULTIMODAL_TYPES = {text_only: family.name for family in MODEL_FAMILIES.values() for text_only in family.text_only}


def family_of_type(model_type: str) -> ModelFamily:
    """The family of models of this type; one that describes nothing where there is none."""
    return MODEL_FAMILIES.get(model_type, _UNKNOWN_FAMILY)


def multimodal_type_of(model_type: str) -> str | None:
    """The type whose family also loads models of `model_type`, which were saved without their vision tower."""
    return _MULTIMODAL_TYPES.get(model_type)


def mtp_spec_of(model_type: str) -> MtpSpec | None:
    """The draft head that checkpoints of this type may hold."""
    name = _MULTIMODAL_TYPES.get(model_type, model_type)
    return MODEL_FAMILIES.get(name, MLX_VLM_FAMILIES.get(name, _UNKNOWN_FAMILY)).head


def attention_spec_of(module: object) -> AttentionSpec | None:
    """Of an attention module of a known class."""
    return _family_of(module).attention.get(type(module).__name__)


def mlp_spec_of(module: object) -> MlpSpec | None:
    """Of an MLP of a known class."""
    spec = _family_of(module).mlps.get(type(module).__name__)
    other = spec is not None and spec.unless is not None and getattr(module, spec.unless) is not None
    return None if other else spec


def moe_spec_of(module: object) -> MoeSpec | None:
    """Of a mixture of experts of a known class."""
    return _family_of(module).moes.get(type(module).__name__)


def recurrence_spec_of(module: object) -> RecurrenceSpec | None:
    """Of a recurrent mixer of a known class."""
    return _family_of(module).recurrences.get(type(module).__name__)


def expert_gate_of(activation: object) -> Literal["silu", "gelu_tanh"] | None:
    """What an activation of a known class does to the gates of experts."""
    return _family_of(activation).expert_gates.get(type(activation).__name__)


def norm_spec_of(module: object) -> NormSpec | None:
    """Of a norm of a family's own class."""
    return _family_of(module).norms.get(type(module).__name__)


def rope_spec_of(module: object) -> RopeSpec | None:
    """Of a RoPE of a family's own class."""
    return _family_of(module).ropes.get(type(module).__name__)


def layer_spec_of(layer: object) -> LayerSpec | None:
    """Of a decoder layer of a known class."""
    return _family_of(layer).layers.get(type(layer).__name__)


def decoder_spec_of(module: object) -> DecoderSpec | None:
    """Of a decoder whose own code cannot run mixed batches."""
    return _family_of(module).decoders.get(type(module).__name__)


def is_uncompiled(module: object) -> bool:
    """Whether it goes wrong where MLX compiles its functions."""
    return type(module).__name__ in _family_of(module).uncompiled


def is_apart_in_blocks(model: Any) -> bool:
    """Whether its code computes short blocks of tokens one by one, unless each is a row of its own."""
    return _family_of(model.layers[0]).apart_in_blocks


def _family_of(module: object) -> ModelFamily:
    package, _, name = type(module).__module__.rpartition(".")
    if package in (MLX_LM_MODELS, MLX_VLM_MODELS):
        families = MODEL_FAMILIES if package == MLX_LM_MODELS else MLX_VLM_FAMILIES
        return families.get(name, _UNKNOWN_FAMILY)
    whole, _, family = package.rpartition(".")
    is_language = (whole, name) == (MLX_VLM_MODELS, "language")
    return MLX_VLM_FAMILIES.get(family, _UNKNOWN_FAMILY) if is_language else _UNKNOWN_FAMILY

"""Tiny random-weight models of mlx-lm's families, and of mlx-vlm's beyond these, as `families.toml` describes them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ingot.models.vlm_language import language_classes_of
from ingot.upstream import import_upstream

_DESCRIBED = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
_GROUPS: dict[str, dict[str, Any]] = _DESCRIBED["groups"]
FAMILIES: dict[str, dict[str, Any]] = _DESCRIBED["families"]
VLM_FAMILIES: dict[str, dict[str, Any]] = _DESCRIBED["mlx_vlm"]
"""What only mlx-vlm has."""
VOCAB: int = _GROUPS["base"]["vocab_size"]
UNLOADABLE = {"olmo": "its module exits unless another package is installed"}
SHARED_CODE = {
    *("__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
    *("rope_utils", "ssm", "switch_layers"),
}


def upstream_files() -> list[Path]:
    """Where mlx-lm's families are: a file each."""
    models = import_upstream("mlx_lm.models")
    return [path for path in Path(models.__path__[0]).glob("*.py") if path.stem not in SHARED_CODE]


def config(name: str) -> dict[str, Any]:
    """What the `config.json` of such a model holds."""
    own = dict((FAMILIES | VLM_FAMILIES)[name])
    family = own.pop("family", name)
    inside = own.pop("inside", None)
    around = own.pop("around", {})
    keys: dict[str, Any] = {"rope_scaling": None, **_GROUPS["base"]}
    for group in own.pop("use", ()):
        keys |= _GROUPS[group]
    keys |= dict.fromkeys(own.pop("without", ()))
    keys |= own
    if inside is None:
        return {"model_type": family, **keys}
    return {"model_type": family, "vocab_size": VOCAB, **around, "text_config": {"model_type": inside, **keys}}


def skeleton(name: str) -> Any:
    """A model as mlx-lm makes it, none of whose weights is computed yet."""
    described = config(name)
    if name in VLM_FAMILIES:
        model_class, args_class = language_classes_of(described)
        return model_class(args_class.from_dict(described))
    module = import_upstream(f"mlx_lm.models.{described['model_type']}")
    return module.Model(module.ModelArgs.from_dict(described))


def build(name: str) -> Any:
    """A model with random weights large enough that every part of it shows in its logits."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    def widened(path: str, weight: mx.array) -> mx.array:
        if "norm" in path or path.endswith("signs") or not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return weight + 0.2 * mx.random.normal(weight.shape)

    mx.random.seed(0)
    model = skeleton(name)
    model.update(tree_map_with_path(widened, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model

"""Model folders that every server of MLX models can load, made for measuring.

Their answers do not end by themselves: no token is named as an end token, so that each is as long as requested, also
from a server without an option for that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench import random_models
from ingot.config import DEFAULT_MODEL, Settings
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import Progress
from ingot.upstream import load_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DEFAULT = "default"


def write(name: str, folder: Path, progress: Progress) -> None:
    """`default`, the packaged model, or a shape of `random_models`."""
    if name == DEFAULT:
        write_default(folder, progress)
    else:
        random_models.write(folder, name)
    make_endless(folder)


def write_default(folder: Path, progress: Progress) -> None:
    source = ensure_packaged_model(DEFAULT_MODEL, Settings(), progress)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(source / name, folder / name)
    from ingot.kernels.device import current_device

    if current_device().kind == "cpu":
        _write_dense(source, folder)
    else:
        for file in (source / "config.json", *source.glob("model*.safetensors*")):
            shutil.copyfile(file, folder / file.name)


def _write_dense(source: Path, folder: Path) -> None:
    """As float32. ingot unpacks packed weights by itself on a CPU, where a server that does not is hardly one."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ingot.models.precision import dequantize_layers

    model, config = load_model(source)
    dequantize_layers(model)
    model.set_dtype(mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    packing = ("quantization", "quantization_config")
    _write_json(folder / "config.json", {name: value for name, value in config.items() if name not in packing})


def make_endless(folder: Path) -> None:
    """Forget which tokens end an answer."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        stated = json.loads((folder / file).read_text(encoding="utf-8"))
        stated.pop(key, None)
        _write_json(folder / file, stated)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")

"""The models of the server: one that stays, with an adapter, two that take turns in the remaining memory, and the
embedding, reranking and speech models that are on this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ingot.config import load_config
from ingot.models.files.model_store import is_stored
from ingot.models.files.packaged import find_packaged_model

MODELS: Final = Path(__file__).parents[2] / "foundry" / "models"
STAYS: Final = "stays"
TURNS: Final = ("hybrid", "window")
LORA: Final = "tuned"
RANK: Final = 8
PACKAGED: Final = {"vectors": "all-minilm-l6-v2", "ears": "whisper-tiny.en"}
CLAIMS_MB: Final = {STAYS: 450, "hybrid": 250, "window": 250, "rerank": 100, "vectors": 250, "ears": 700}
"""What each is given. The two that take turns do not fit together."""


def here() -> list[str]:
    """Which of the packaged models were fetched."""
    shelf = load_config({}, os.environ).settings.models_dir
    known = {name: find_packaged_model(model) for name, model in PACKAGED.items()}
    return [name for name, model in known.items() if model and is_stored(shelf / PACKAGED[name], model.origin)]


def write_tables(model: Path, folder: Path) -> Path:
    """A TOML file for `--config`."""
    further = here()
    paths = {**{name: str(MODELS / name) for name in (*TURNS, "rerank")}, **{name: PACKAGED[name] for name in further}}
    room = sum(CLAIMS_MB[name] for name in (STAYS, "rerank", *further)) + max(CLAIMS_MB[name] for name in TURNS)
    lora = write_lora(model, folder / LORA)
    lines = ["lazy = true", f'memory = "{room}MB"', "min_residency_s = 1", f"[models.{STAYS}]", f'path = "{model}"']
    lines += ["pin = true", "preload = true", f'memory = "{CLAIMS_MB[STAYS]}MB"', f'lora_modules = ["{LORA}={lora}"]']
    for name, path in paths.items():
        lines += [f"[models.{name}]", f'path = "{path}"', f'memory = "{CLAIMS_MB[name]}MB"']
    file = folder / "tables.toml"
    file.write_text("\n".join(lines))
    return file


def write_lora(model: Path, folder: Path) -> Path:
    """An adapter for whatever of a model's layers project into heads and values and are not packed, as mlx-lm would
    write it."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(0), {}
    with safe_open(model / "model.safetensors", "numpy") as file:
        names = {*file.keys()}
        for name in sorted(names):
            found = re.fullmatch(r"(.+\.(?:q|v)_proj)\.weight", name)
            if found is not None and f"{found[1]}.scales" not in names:
                outputs, inputs = file.get_slice(name).get_shape()
                tensors[f"{found[1]}.lora_a"] = rng.normal(size=(inputs, RANK)).astype(np.float32)
                tensors[f"{found[1]}.lora_b"] = rng.normal(size=(RANK, outputs)).astype(np.float32)
    parameters = {"rank": RANK, "scale": 0.01, "dropout": 0.0}
    stated = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "adapters.safetensors")
    return folder

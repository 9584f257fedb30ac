"""Model folders that every server of MLX models can load, made for measuring.

Their answers do not end by themselves: no token is named as an end token, so that each is as long as requested, also
from a server without an option for that.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench import random_models
from ingot.cli.peers import models
from ingot.config import DEFAULT_MODEL, Settings
from ingot.kernels.device import current_device
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import Progress

DEFAULT = "default"


def write(name: str, folder: Path, progress: Progress) -> None:
    """`default`, the packaged model, or a shape of `random_models`."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        if name != DEFAULT:
            random_models.write(made, name)
        else:
            source = ensure_packaged_model(DEFAULT_MODEL, Settings(), progress)
            made = source if current_device().kind != "cpu" else made
            if made is not source:
                models.write_dense(source, made)
        shutil.copytree(models.write_twin(made, Path(scratch) / "twin", ends=False), folder, dirs_exist_ok=True)

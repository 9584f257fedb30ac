"""From one model folder to another, which is whole or not there at all.

The weights are packed by mlx-lm's own code, or are packed already and taken over. A head is never packed: rounded to a
few bits, it guesses much less than it costs.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ingot.errors import ModelError
from ingot.models.convert_packing import Packing
from ingot.models.draft_heads.checkpoint import SIDE_FILE, SIDE_PLACES, HeadSource
from ingot.models.draft_heads.mtp import build_head
from ingot.models.files.config_names import older_names
from ingot.models.files.folder_checks import READ
from ingot.models.files.model_store import is_kept, keep
from ingot.models.files.progress import Progress, format_bytes
from ingot.models.gguf.quant_types import BLOCKS_KEY
from ingot.models.heads.headless import classes_in
from ingot.models.heads.tensors import is_norm, stored_tensors
from ingot.upstream import import_upstream, load_config, load_model

_MADE_ANEW = ("config.json", "model.safetensors.index.json", "ingot.json")


@dataclass(frozen=True)
class Conversion:
    """What is to be made: of the model in `folder`, packed unless it is already, with `head` beside it."""

    folder: Path
    source: str  # what people call it
    packing: Packing | None
    head: HeadSource | None

    @property
    def origin(self) -> dict[str, Any]:
        """All that the result depends on."""
        head = [] if self.head is None else [_fingerprint(file) for file in self.head.files]
        files = [_fingerprint(file) for file in sorted(self.folder.glob("model*.safetensors"))]
        return {"source": self.source, "packing": str(self.packing), "files": files, "head": head}

    def run(self, target: Path, progress: Progress) -> None:
        """Make `target`, or leave it as it is if just this was made there before. Killed at any moment, it leaves
        nothing there. Raises ModelError, before anything is written where the head does not fit."""
        if target.exists() and not is_kept(target, self.origin):
            raise ModelError(f"{target.name} is there already; remove it first, or choose another folder")
        if self.head is not None:
            build_head(self.head, _config(self.folder))
        keep(target, self.origin, lambda made: self._fill(made, progress), progress)

    def _fill(self, made: Path, progress: Progress) -> None:
        if self.packing is None:
            _take_over(self.folder, made, progress)
        else:
            progress(f"packing {self.source} in {self.packing}")
            _pack(self.folder, made, self.packing)
        if self.head is not None:
            progress(f"writing its head: {format_bytes(self.head.nbytes)}")
            write_head(self.head, made / SIDE_FILE)
        for file in sorted(self.folder.iterdir()):
            if file.is_file() and file.suffix in READ and file.suffix != ".safetensors" and file.name not in _MADE_ANEW:
                shutil.copyfile(file, made / file.name)


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether its weights stay in fewer bits when it is loaded. Published ones of 8 bits, in blocks, mostly do not."""
    if any(config.get(key) for key in ("quantization", BLOCKS_KEY)):
        return True
    said = config.get("quantization_config") or {}
    return bool(said) and (said.get("quant_method") != "fp8" or said.get("scale_fmt") == "ue8m0")


def write_head(source: HeadSource, file: Path) -> None:
    """A head by itself, by the names that its tensors had, in bfloat16."""
    tensors = stored_tensors(source)
    written = {source.tensors[name].name: _narrow(name, array) for name, array in tensors.items()}
    mx.save_safetensors(str(file), written, {"format": "mlx"})


def _narrow(name: str, array: mx.array) -> mx.array:
    """What else has one dimension is small, and may be wide for a reason: the bias that a router chooses by is."""
    factors = name.endswith(("scales", "biases", "scale_inv"))  # which stay, with the weights that they unpack
    wanted = mx.issubdtype(array.dtype, mx.floating) and not factors and (array.ndim > 1 or is_norm(name))
    return array.astype(mx.bfloat16) if wanted else array


def _pack(folder: Path, made: Path, packing: Packing) -> None:
    stated, upstream = load_config(folder), import_upstream("mlx_lm.utils")
    classes = classes_in(folder, stated)
    try:
        model, config = load_model(folder, model_config=older_names(stated), get_model_classes=classes)
        with redirect_stdout(io.StringIO()):  # which it reports to
            model, config = upstream.quantize_model(model, config, packing.group_size, packing.bits, mode=packing.mode)
        upstream.save_model(made, model, donate_model=True)
    # The code of a hundred families reads this folder and may trip over anything; one asks Python to exit.
    except (Exception, SystemExit) as error:
        raise ModelError(f"{folder.name} cannot be packed: {error}") from error
    upstream.save_config(config, made / "config.json")


def _take_over(folder: Path, made: Path, progress: Progress) -> None:
    """The model's own files, without a copy where the disk is the same."""
    left = {folder / place for place in SIDE_PLACES}
    for file in (*sorted(folder.glob("model*.safetensors")), *(folder / name for name in _MADE_ANEW[:2])):
        if file in left or not file.is_file():
            continue
        progress(f"taking over {file.name}")
        try:
            os.link(file.resolve(), made / file.name)
        except OSError:
            shutil.copyfile(file, made / file.name)


def _config(folder: Path) -> dict[str, Any]:
    stated = load_config(folder)
    return {**stated, **older_names(stated)}


def _fingerprint(file: Path) -> list[Any]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]

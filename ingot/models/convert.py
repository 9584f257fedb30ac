"""Converting a model folder into another one: quantised, with its draft head as it was.

The new folder is complete or not there at all. The weights are quantised by mlx-lm's own code, or are quantised already
and reused; those of a vision tower stay as they are, in a file of their own. A draft head is never quantised: in a few
bits, it predicts much less than it costs. `find_head_elsewhere` finds a head in another checkpoint; of one on the hub,
only the files that hold it are fetched.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from ingot.config import Settings
from ingot.errors import ConfigError, ModelError
from ingot.models.draft_heads.checkpoint import (
    HEAD_FILE,
    HEAD_FILES,
    INDEX_FILE,
    HeadSource,
    find_head,
    find_head_in,
    indexed_head_files,
    is_norm_weight,
    model_classes_for,
    stored_head_tensors,
)
from ingot.models.draft_heads.loading import DRAFTER_FOLDER, DrafterFolder, drafter_in
from ingot.models.draft_heads.mtp import build_mtp_head
from ingot.models.experts.records import write_expert_records
from ingot.models.files import hub
from ingot.models.files.folder_checks import READ_SUFFIXES
from ingot.models.files.model_config import older_config_names
from ingot.models.files.model_store import is_stored, store_model
from ingot.models.files.progress import Progress, format_bytes
from ingot.models.files.short_names import full_model_name
from ingot.models.gguf.quant_types import BLOCKS_KEY
from ingot.models.vision.loading import TOWER_FILE, has_vision_tower, write_tower
from ingot.upstream import has_packed_integers, import_upstream, load_config, load_model

AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)
FIXED_MODES: Final = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Modes with one form: bits, and weights that share a scale."""
QUANTIZATION_MODES: Final = ("affine", *FIXED_MODES)
_REWRITTEN = ("config.json", "model.safetensors.index.json", "ingot.json")
_SMALL_FILES = ("config.json", INDEX_FILE, "mtp.safetensors", "mtp/*.safetensors", "model-mtp.safetensors")


@dataclass(frozen=True)
class Conversion:
    """A conversion of the model in `folder`, quantised unless it is already, with `head`."""

    folder: Path
    source: str  # its name for people
    quantization: WeightQuantization | None
    head: HeadSource | DrafterFolder | None
    records: bool = False
    """Its experts lie beside each other (`models/experts/records.py`)."""

    @property
    def origin(self) -> dict[str, Any]:
        """All that the result depends on, as the model store records it."""
        head = [] if self.head is None else [_file_fingerprint(file) for file in self.head.files]
        files = [_file_fingerprint(file) for file in sorted(self.folder.glob("model*.safetensors"))]
        origin = {"source": self.source, "packing": str(self.quantization), "files": files, "head": head}
        return origin | ({"experts": "records"} if self.records else {})

    def run(self, target: Path, progress: Progress) -> None:
        """Make `target`, unless just this was made there before. Killed at any moment, it leaves nothing there. Raises
        ModelError, before anything is written where the head does not fit."""
        if target.exists() and not is_stored(target, self.origin):
            raise ModelError(f"{target.name} is there already; remove it first, or choose another folder")
        if isinstance(self.head, HeadSource):
            build_mtp_head(self.head, _full_config(self.folder))
        store_model(target, self.origin, lambda folder: self._fill(folder, progress), progress)

    def _fill(self, target: Path, progress: Progress) -> None:
        if self.records:
            self._write_records(target, progress)
        else:
            self._write_weights(target, progress)
        if self.head is not None:
            progress(f"writing its draft head: {format_bytes(self.head.nbytes)}")
            if isinstance(self.head, HeadSource):
                write_head(self.head, target / HEAD_FILE)
            else:
                self.head.copy(target / DRAFTER_FOLDER)
        for file in sorted(self.folder.iterdir()):
            if (
                file.is_file()
                and file.suffix in READ_SUFFIXES
                and file.suffix != ".safetensors"
                and file.name not in _REWRITTEN
            ):
                shutil.copyfile(file, target / file.name)

    def _write_weights(self, target: Path, progress: Progress) -> None:
        if self.quantization is None and not has_packed_integers(self.folder, load_config(self.folder)):
            _reuse_weights(self.folder, target, progress)
            return
        form = "MLX's format" if self.quantization is None else self.quantization
        progress(f"{'bringing' if self.quantization is None else 'quantising'} {self.source} to {form}")
        _write_model(self.folder, target, self.quantization)
        self._write_tower(target / TOWER_FILE, progress)

    def _write_tower(self, file: Path, progress: Progress) -> None:
        """Its vision tower, as it is."""
        config = load_config(self.folder)
        if not has_vision_tower(self.folder, config):
            return
        try:
            write_tower(self.folder, config, file)
        except ModelError as error:
            progress(f"its vision tower is left out: {error.message}")

    def _write_records(self, target: Path, progress: Progress) -> None:
        with tempfile.TemporaryDirectory(dir=target) as made:
            packed = Path(made)
            self._write_weights(packed, progress)
            shutil.copyfile(packed / "config.json", target / "config.json")
            write_expert_records(packed, target, progress)


def is_quantized_config(config: Mapping[str, Any]) -> bool:
    """Whether its weights stay in fewer bits when it is loaded. Published ones of 8 bits, in blocks, mostly do not."""
    if any(config.get(key) for key in ("quantization", BLOCKS_KEY)):
        return True
    form = config.get("quantization_config") or {}
    return bool(form) and (form.get("quant_method") != "fp8" or form.get("scale_fmt") == "ue8m0")


def write_head(source: HeadSource, file: Path) -> None:
    """A draft head alone, by its tensors' original names, in bfloat16."""
    tensors = stored_head_tensors(source)
    written = {source.tensors[name].name: _narrowed_head_tensor(name, array) for name, array in tensors.items()}
    mx.save_safetensors(str(file), written, {"format": "mlx"})


def _narrowed_head_tensor(name: str, array: mx.array) -> mx.array:
    """Other tensors of one dimension are small, and may be wide for a reason, as the bias of a router is."""
    factors = name.endswith(("scales", "biases", "scale_inv"))  # which stay, with their quantised weights
    wanted = mx.issubdtype(array.dtype, mx.floating) and not factors and (array.ndim > 1 or is_norm_weight(name))
    return array.astype(mx.bfloat16) if wanted else array


def _write_model(folder: Path, target: Path, form: WeightQuantization | None) -> None:
    """Quantised, unless it is already."""
    stated, upstream = load_config(folder), import_upstream("mlx_lm.utils")
    classes = model_classes_for(folder, stated)
    try:
        model, config = load_model(folder, model_config=older_config_names(stated), get_model_classes=classes)
        if form is not None:
            with redirect_stdout(io.StringIO()):  # which it reports to
                model, config = upstream.quantize_model(model, config, form.group_size, form.bits, mode=form.mode)
        upstream.save_model(target, model, donate_model=True)
    # The code of a hundred families reads this folder and may fail in any way; one exits.
    except (Exception, SystemExit) as error:
        raise ModelError(f"{folder.name} cannot be converted: {error}") from error
    config |= {name: stated[name] for name in ("text_config",) if name in stated}  # mlx-vlm's classes take no more keys
    upstream.save_config(config, target / "config.json", keep_vision_config=True)


def _reuse_weights(folder: Path, target: Path, progress: Progress) -> None:
    """The model's own files, without a copy where the disk is the same."""
    head_files = {folder / path for path in HEAD_FILES}
    for file in (*sorted(folder.glob("model*.safetensors")), *(folder / name for name in _REWRITTEN[:2])):
        if file in head_files or not file.is_file():
            continue
        progress(f"reusing {file.name}")
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


def _full_config(folder: Path) -> dict[str, Any]:
    stated = load_config(folder)
    return {**stated, **older_config_names(stated)}


def _file_fingerprint(file: Path) -> list[Any]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.mode == "affine" else self.mode


def choose_quantization(
    mode: str = "affine", bits: int | None = None, group_size: int | None = None
) -> WeightQuantization:
    """The requested form, with MLX's usual defaults. Raises ConfigError for what MLX does not support."""
    if mode not in QUANTIZATION_MODES:
        raise ConfigError(f"--mode must be one of {', '.join(QUANTIZATION_MODES)}, not {mode!r}")
    if mode in FIXED_MODES:
        if (bits or FIXED_MODES[mode][0], group_size or FIXED_MODES[mode][1]) != FIXED_MODES[mode]:
            form = f"{FIXED_MODES[mode][0]} bits in groups of {FIXED_MODES[mode][1]}"
            raise ConfigError(f"--mode {mode} has {form}; leave out --bits and --group-size")
        return WeightQuantization(mode, *FIXED_MODES[mode])
    chosen = WeightQuantization(mode, 4 if bits is None else bits, 64 if group_size is None else group_size)
    if chosen.bits not in AFFINE_BITS:
        raise ConfigError(f"--bits must be one of {_comma_list(AFFINE_BITS)}, not {chosen.bits}")
    if chosen.group_size not in AFFINE_GROUPS:
        raise ConfigError(f"--group-size must be one of {_comma_list(AFFINE_GROUPS)}, not {chosen.group_size}")
    return chosen


def _comma_list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def find_own_head(folder: Path, config: Mapping[str, Any]) -> HeadSource | DrafterFolder | None:
    """The draft head of the model in `folder`: a drafter beside it, or its own."""
    return drafter_in(folder) or find_head(folder, config)


def find_head_elsewhere(
    name: str, config: Mapping[str, Any], settings: Settings, progress: Progress
) -> HeadSource | DrafterFolder:
    """The draft head in a folder, in a file or on the hub, for a model with this config. Raises ModelError if there is
    none."""
    path = Path(name).expanduser()
    if not path.exists():
        name = full_model_name(name)
        if not hub.is_hub_id(name):
            raise ModelError(f"there is no file or folder {name!r} with a draft head")
        path = _fetch_head_files(name, config, settings, progress)
    found = find_own_head(path, config) if path.is_dir() else None
    found = found or find_head_in(path, config)
    if found is None:
        raise ModelError(f"{name} holds no head that is known for models of type {config.get('model_type')}")
    return found


def _fetch_head_files(name: str, config: Mapping[str, Any], settings: Settings, progress: Progress) -> Path:
    folder = hub.fetch_from_hub(name, settings, progress, _SMALL_FILES)
    files = indexed_head_files(folder, config)
    if files is None:
        return hub.fetch_from_hub(name, settings, progress)
    return hub.fetch_from_hub(name, settings, progress, [*_SMALL_FILES, *files])

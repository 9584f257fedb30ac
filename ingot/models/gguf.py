"""Imports a GGUF file: writes the same model as a folder that mlx-lm and transformers' tokenizers read."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.models.gguf_families import Blueprint, Wanted, blueprint
from ingot.models.gguf_file import GGUFFile, TensorEntry
from ingot.models.gguf_hyper import Hyper
from ingot.models.gguf_tensors import GROUP, KNOWN_KINDS, PACKED_BITS, dense, narrowest, pack
from ingot.models.gguf_tokenizer import TokenizerFiles, build_tokenizer
from ingot.models.progress import Progress, format_bytes
from ingot.models.weights import SHARD_BYTES, Tensor, write_weights

CHUNK_WEIGHTS = 1 << 24  # weights unpacked at a time; bounds the memory that a huge matrix needs
SAMPLING_KEYS = {
    "sampling.temp": "temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "sampling.min_p": "min_p",
    "sampling.penalty_repeat": "repetition_penalty",
}


def convert_gguf(source: Path, target: Path, progress: Progress, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the model in `source` to the existing folder `target`; nothing of it is executed.

    Weights keep their exact values wherever MLX has the format. Raises ModelError for a file that is damaged or
    that cannot be run as it describes itself; what `target` then holds is to be thrown away.
    """
    with GGUFFile(source) as file:
        _refuse_other_files(file)
        plan = blueprint(file)
        _check_tensors(file, plan)
        tokenizer = build_tokenizer(file.metadata, plan.config["vocab_size"])
        _check_space(file, plan, target)
        write_weights(target, _converted(file, plan, progress), _names(file, plan), shard_bytes)
        _write_configs(file, plan, tokenizer, target)


def _refuse_other_files(file: GGUFFile) -> None:
    name, metadata = file.path.name, file.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{name} is one of {metadata['split.count']} parts; merge them into one file first")
    if metadata.get("general.type", "model") != "model":
        raise ModelError(f"{name} holds no model of its own: its general.type is {metadata['general.type']!r}")
    if metadata.get("general.quantization_version", 2) != 2:
        version = metadata["general.quantization_version"]
        raise ModelError(f"{name} has general.quantization_version {version}; only 2 is supported")


def _check_tensors(file: GGUFFile, plan: Blueprint) -> None:
    wanted = {item.source: item for item in plan.tensors}
    for item in plan.tensors:
        entry = file.tensors.get(item.source)
        if entry is None:
            raise ModelError(f"the file lacks the tensor {item.source!r}")
        if entry.type not in KNOWN_KINDS:
            known = ", ".join(sorted(kind.name for kind in KNOWN_KINDS))
            raise ModelError(f"tensor {entry.name!r} is {entry.type.name}, which is not supported; supported: {known}")
        if entry.shape != item.shape:
            raise ModelError(f"tensor {entry.name!r} has the shape {list(entry.shape)}, not {list(item.shape)}")
        file.check_bounds(entry)
    for name in file.tensors:
        if name not in wanted and name not in plan.spent:
            architecture = file.metadata["general.architecture"]
            raise ModelError(f"the file has the tensor {name!r}, which {architecture} models do not have")


def _is_packed(file: GGUFFile, item: Wanted) -> bool:
    return len(item.shape) == 2 and file.tensors[item.source].type in PACKED_BITS


def _names(file: GGUFFile, plan: Blueprint) -> list[str]:
    """Every name in the weight files."""
    names = [item.target for item in plan.tensors]
    packed = [item.module for item in plan.tensors if _is_packed(file, item)]
    return names + [f"{module}.{part}" for module in packed for part in ("scales", "biases")]


def _check_space(file: GGUFFile, plan: Blueprint, target: Path) -> None:
    needed = sum(_written_bytes(file.tensors[item.source]) for item in plan.tensors)
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ModelError(
            f"converting {file.path.name} needs {format_bytes(needed)} in the models folder, "
            f"which has {format_bytes(free)} free"
        )


def _written_bytes(entry: TensorEntry) -> int:
    weights = math.prod(entry.shape)
    bits = PACKED_BITS.get(entry.type)
    if bits:
        return weights * bits // 8 + weights // GROUP * 8
    return weights * (4 if entry.type == Kind.F32 else 2)


def _converted(file: GGUFFile, plan: Blueprint, progress: Progress) -> Iterator[list[Tensor]]:
    """Each module's tensors in turn."""
    sizes = [file.tensors[item.source].size for item in plan.tensors]
    done, total = 0, sum(sizes)
    message = f"converting {file.path.name}"
    for item, size in zip(plan.tensors, sizes, strict=True):
        progress(message, done, total)
        entry = file.tensors[item.source]
        if len(item.shape) == 1:
            yield [_vector(file, entry, item)]
        elif _is_packed(file, item):
            yield _packed_matrix(file, entry, item)
        else:
            yield [_dense_matrix(file, entry, item)]
        done += size
    progress(message, total, total)


def _vector(file: GGUFFile, entry: TensorEntry, item: Wanted) -> Tensor:
    """Norms and biases: few numbers, on which much depends, so float32."""
    values = dense(file.rows(entry, 0, 1), entry.type).astype(np.float32)[0]
    values = _finite(entry, values[_row_order(item, 0, len(values))])
    return Tensor(item.target, values - np.float32(item.minus))


def _packed_matrix(file: GGUFFile, entry: TensorEntry, item: Wanted) -> list[Tensor]:
    chunks = [pack(raw, entry.type) for raw in _chunks(file, entry, item)]
    scales = _finite(entry, np.concatenate([chunk.scales for chunk in chunks]))
    biases = _finite(entry, np.concatenate([chunk.biases for chunk in chunks]))
    dtype = max(narrowest(scales), narrowest(biases), key=lambda kind: kind(0).nbytes)
    return [
        Tensor(item.target, np.concatenate([chunk.weight for chunk in chunks])),
        Tensor(f"{item.module}.scales", scales.astype(dtype)),
        Tensor(f"{item.module}.biases", biases.astype(dtype)),
    ]


def _dense_matrix(file: GGUFFile, entry: TensorEntry, item: Wanted) -> Tensor:
    if entry.type == Kind.BF16:
        bits = np.concatenate([raw.view("<u2") for raw in _chunks(file, entry, item)])
        if np.any(bits & 0x7F80 == 0x7F80):
            raise _not_finite(entry)
        return Tensor(item.target, bits, bfloat16=True)
    return Tensor(item.target, _finite(entry, _floats(file, entry, item)))


def _floats(file: GGUFFile, entry: TensorEntry, item: Wanted) -> np.ndarray:
    """F16 and F32 as they are; what was quantised as float16, or as float32 where that overflows."""
    if entry.type not in (Kind.F16, Kind.F32):
        try:
            with np.errstate(over="raise"):
                return np.concatenate([dense(raw, entry.type).astype(np.float16) for raw in _chunks(file, entry, item)])
        except FloatingPointError:
            pass
    return np.concatenate([dense(raw, entry.type) for raw in _chunks(file, entry, item)])


def _chunks(file: GGUFFile, entry: TensorEntry, item: Wanted) -> Iterator[np.ndarray]:
    """The rows of a matrix, in the order that the model wants, so many at a time as memory allows."""
    rows, columns = entry.shape
    head = rows // item.heads if item.heads else 1
    step = max(1, CHUNK_WEIGHTS // (columns * head)) * head
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield file.rows(entry, start, stop)[_row_order(item, start, stop)]


def _row_order(item: Wanted, start: int, stop: int) -> np.ndarray | slice:
    """Which of the rows [start, stop) comes first, second... `start` and `stop` are at the edge of a head."""
    if not item.heads:
        return slice(None)
    head = item.shape[0] // item.heads
    return np.arange(stop - start).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()


def _finite(entry: TensorEntry, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise _not_finite(entry)
    return values


def _not_finite(entry: TensorEntry) -> ModelError:
    return ModelError(f"tensor {entry.name!r} holds numbers that are not finite: the file is damaged")


def _write_configs(file: GGUFFile, plan: Blueprint, tokenizer: TokenizerFiles, target: Path) -> None:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    known_ids = {key: value for key, value in ids.items() if value is not None}
    _write_json(target / "config.json", plan.config | known_ids | _quantization(file, plan))
    _write_json(target / "generation_config.json", known_ids | _sampling(file))
    limit = {"model_max_length": plan.config["max_position_embeddings"]}
    _write_json(target / "tokenizer_config.json", tokenizer.config | limit)
    tokenizer.tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    for name, template in tokenizer.named_templates.items():
        folder = target / "additional_chat_templates"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.jinja").write_text(template, encoding="utf-8")


def _sampling(file: GGUFFile) -> dict[str, Any]:
    """The sampling that the file recommends."""
    general = Hyper(file, "general")
    said = {name: key for key, name in SAMPLING_KEYS.items() if general.get(key) is not None}
    return {
        name: general.get(key) if isinstance(general.get(key), int) else general.number(key)
        for name, key in said.items()
    }


def _quantization(file: GGUFFile, plan: Blueprint) -> dict[str, Any]:
    """The commonest width for all, and an entry for each module that differs: another width, or none at all."""
    bits = {
        item.module: PACKED_BITS[file.tensors[item.source].type] if _is_packed(file, item) else None
        for item in plan.tensors
        if len(item.shape) == 2
    }
    widths = Counter(width for width in bits.values() if width)
    if not widths:
        return {}
    usual = widths.most_common(1)[0][0]
    others = {module: _affine(width) if width else False for module, width in bits.items() if width != usual}
    return {"quantization": _affine(usual) | others}


def _affine(bits: int) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": "affine"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

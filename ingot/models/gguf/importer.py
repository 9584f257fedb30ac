"""Imports a GGUF file: writes the same model as a folder that mlx-lm and transformers' tokenizers read."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.constants import LlamaFileType
from gguf.quants import quantize

from ingot.errors import ModelError
from ingot.models.files.gguf_files import GgufReferences, GgufSourceFile, ReferencedTensor, write_references
from ingot.models.files.model_config import FILE_TYPE_KEY, MOVED_KEY
from ingot.models.files.progress import Progress, format_bytes
from ingot.models.files.tensor_files import SHARD_BYTES, NamedTensor, write_safetensors
from ingot.models.gguf.architectures import read_blueprint
from ingot.models.gguf.blueprint import Blueprint, WantedTensor
from ingot.models.gguf.file import GGUFModel, Hyperparameters, TensorEntry
from ingot.models.gguf.quant_types import (
    BLOCK_BITS,
    BLOCKS_KEY,
    KNOWN_KINDS,
    LATTICE_ERRORS,
    PACKED_BITS,
    QUANT_GROUP,
    SMALL_BLOCKS,
    PackedRows,
    block_units,
    dequantize_rows,
    narrowest_float,
    pack_blocks,
    packed_format,
    rope_head_order,
)
from ingot.models.gguf.tokenizer import TokenizerFiles, build_tokenizer

DRAFT_HEAD_MARK = ".nextn."  # in the names of tensors of a draft head
NUMBER_KINDS = (Kind.F32, Kind.F16, Kind.BF16)
KINDS_THAT_STAY = frozenset({*BLOCK_BITS, *SMALL_BLOCKS, *NUMBER_KINDS})  # formats whose tensors need not be converted
MOST_PIECES = 4096  # of a tensor that stays in the file
CHUNK_WEIGHTS = 1 << 24  # weights unpacked at a time; bounds the memory that a huge matrix needs
FILE_TYPES = {
    each.value: each.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    for each in LlamaFileType
    if each != LlamaFileType.GUESSED
}
SAMPLING_KEYS = {
    "sampling.temp": "temperature",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "sampling.min_p": "min_p",
    "sampling.penalty_repeat": "repetition_penalty",
}


def convert_gguf(
    source: Path, target: Path, progress: Progress, *, shard_bytes: int = SHARD_BYTES, in_place: bool = False
) -> None:
    """Writes the model in `source` to the existing folder `target`; nothing of it is executed.

    Weights keep their exact values wherever MLX has the format. `in_place`: tensors that need not be converted stay in
    the file, which the folder refers to. Raises ModelError for a file that is damaged or that cannot be run as it
    describes itself; `target` is then to be discarded.
    """
    with GGUFModel(source) as file:
        _refuse_other_files(file)
        plan = read_blueprint(file)
        _check_tensors(file, plan)
        tokenizer = build_tokenizer(file.metadata, plan.config["vocab_size"])
        # A draft head is loaded from the folder's own weights.
        has_draft_head = any(DRAFT_HEAD_MARK in item.source for item in plan.tensors)
        staying = _tensors_that_stay(file, plan, progress) if in_place and not has_draft_head else []
        moving = replace(plan, tensors=tuple(item for item in plan.tensors if item not in staying))
        _check_space(file, moving, target)
        write_safetensors(target, _converted_tensors(file, moving, progress), _tensor_names(file, moving), shard_bytes)
        if staying:
            write_references(target, _references(file, staying))
        _write_configs(file, plan, tokenizer, target)


def _refuse_other_files(file: GGUFModel) -> None:
    name, metadata = file.path.name, file.metadata
    if metadata.get("general.type", "model") != "model":
        raise ModelError(f"{name} holds no model of its own: its general.type is {metadata['general.type']!r}")
    if metadata.get("general.quantization_version", 2) != 2:
        version = metadata["general.quantization_version"]
        raise ModelError(f"{name} has general.quantization_version {version}; only 2 is supported")


def _check_tensors(file: GGUFModel, plan: Blueprint) -> None:
    wanted: set[str] = set()
    for item in plan.tensors:
        for name, shape in item.sources(file.tensors):
            wanted.add(name)
            _check_tensor(file, name, shape)
        kinds = sorted({entry.type.name for entry in _tensor_entries(file, item)})
        if len(kinds) > 1 and item.join is None:
            parts = "experts" if item.experts else "parts"
            raise ModelError(f"the {parts} of {item.source!r} are of unlike types: {', '.join(kinds)}")
    for name in file.tensors:
        if name not in wanted and name not in plan.spent:
            architecture = file.metadata["general.architecture"]
            raise ModelError(f"the file has the tensor {name!r}, which {architecture} models do not have")


def _check_tensor(file: GGUFModel, name: str, shape: tuple[int, ...]) -> None:
    entry = file.tensors.get(name)
    if entry is None:
        raise ModelError(f"the file lacks the tensor {name!r}")
    if entry.type not in KNOWN_KINDS:
        supported = ", ".join(sorted(kind.name for kind in KNOWN_KINDS))
        raise ModelError(f"tensor {name!r} is {entry.type.name}, which is not supported; supported: {supported}")
    if entry.shape != shape:
        raise ModelError(f"tensor {name!r} has the shape {list(entry.shape)}, not {list(shape)}")
    entry.check_bounds()


def _tensor_entries(file: GGUFModel, item: WantedTensor) -> list[TensorEntry]:
    """The tensor's entries: one, or one for each expert."""
    return [file.tensors[name] for name, _ in item.sources(file.tensors)]


def _quant_kind(file: GGUFModel, item: WantedTensor) -> Kind:
    """The tensor's format; blocks whose columns come in another order, and that MLX has no form of, get a finer one."""
    kind = _tensor_entries(file, item)[0].type
    return Kind.Q8_0 if item.columns is not None and kind in BLOCK_BITS and kind not in PACKED_BITS else kind


def _is_packed(file: GGUFModel, item: WantedTensor) -> bool:
    can_pack = len(item.target_shape) > 1 and not item.plain and _quant_kind(file, item) in PACKED_BITS
    return can_pack and not _stays_in_blocks(file, item) and (item.columns is None or _group_order(item) is not None)


def _stays_in_blocks(file: GGUFModel, item: WantedTensor) -> bool:
    """Matrices of the K formats, those of experts too."""
    matrices = (len(item.target_shape) == 2 or item.experts) and item.in_blocks and not item.plain
    return matrices and item.join is None and item.columns is None and _quant_kind(file, item) in BLOCK_BITS


def _group_order(item: WantedTensor) -> np.ndarray | None:
    """Which group of columns with a scale in common comes first, second...; None where groups are torn apart."""
    assert item.columns is not None, "columns stay where they are"
    if len(item.columns) % QUANT_GROUP:
        return None
    groups = item.columns.reshape(-1, QUANT_GROUP)
    together = np.all(groups == groups[:, :1] + np.arange(QUANT_GROUP)) and np.all(groups[:, 0] % QUANT_GROUP == 0)
    return groups[:, 0] // QUANT_GROUP if together else None


def _tensors_that_stay(file: GGUFModel, plan: Blueprint, progress: Progress) -> list[WantedTensor]:
    """The tensors that are used as they are in the file. Checks that their numbers are finite, as converting would."""
    candidates = [item for item in plan.tensors if _may_stay(file, item)]
    sizes = [sum(entry.size for entry in _tensor_entries(file, item)) for item in candidates]
    done, message, staying = 0, f"checking {file.path.name}", []
    for item, size in zip(candidates, sizes, strict=True):
        progress(message, done, sum(sizes))
        if all(_is_usable(raw, _quant_kind(file, item), _tensor_entries(file, item)[0]) for raw in _chunks(file, item)):
            staying.append(item)
        done += size
    progress(message, done, sum(sizes))
    return staying


def _may_stay(file: GGUFModel, item: WantedTensor) -> bool:
    kind = _quant_kind(file, item)
    converted = item.join is not None or item.columns is not None or item.convert is not None
    if len(item.target_shape) == 1 or item.shape[-1] != item.target_shape[-1] or converted:
        return False
    if kind not in KINDS_THAT_STAY or len(_pieces(file, item)) > MOST_PIECES:
        return False
    return kind in NUMBER_KINDS or _stays_in_blocks(file, item) or _is_packed(file, item)


def _is_usable(raw: np.ndarray, kind: Kind, entry: TensorEntry) -> bool:
    """Raises ModelError for numbers that are not finite. False where the biases that MLX needs overflow 16 bits."""
    if kind in NUMBER_KINDS:
        exponents = {Kind.F32: ("<u4", 0x7F800000), Kind.F16: ("<u2", 0x7C00), Kind.BF16: ("<u2", 0x7F80)}
        dtype, mask = exponents[kind]
        if np.any(raw.view(dtype) & mask == mask):
            raise _not_finite(entry)
        return True
    factors = _check_finite(entry, block_units(raw, kind))
    if kind not in SMALL_BLOCKS or SMALL_BLOCKS[kind]:
        return True
    return bool(np.abs(factors).max() * 2 ** (PACKED_BITS[kind] - 1) <= np.finfo(np.float16).max)


def _references(file: GGUFModel, staying: list[WantedTensor]) -> GgufReferences:
    numbers = {path: number for number, path in enumerate(file.paths)}
    sources = [(path.resolve(), path.stat()) for path in numbers]
    return GgufReferences(
        files=tuple(GgufSourceFile(str(path), status.st_size, status.st_mtime_ns) for path, status in sources),
        tensors={
            item.target: ReferencedTensor(
                kind=_quant_kind(file, item).name,
                shape=item.target_shape,
                pieces=tuple((numbers[entry.file.path], offset) for entry, offset in _pieces(file, item)),
                heads=item.heads,
            )
            for item in staying
        },
    )


def _pieces(file: GGUFModel, item: WantedTensor) -> list[tuple[TensorEntry, int]]:
    """Where the tensor's rows are, in pieces of equally many."""
    entries = _tensor_entries(file, item)
    if item.rows is None:
        return [(entry, entry.offset) for entry in entries]
    (entry,), edges = entries, np.flatnonzero(np.diff(item.rows) != 1) + 1
    rows = math.gcd(*(end - start for start, end in pairwise((0, *edges.tolist(), len(item.rows)))))
    return [(entry, entry.offset + int(row) * entry.row_bytes) for row in item.rows[::rows]]


def _tensor_names(file: GGUFModel, plan: Blueprint) -> list[str]:
    """Every name that may be in the weight files."""
    names = [item.target for item in plan.tensors]
    packed = [item.module for item in plan.tensors if _is_packed(file, item)]
    return names + [f"{module}.{part}" for module in packed for part in ("scales", "biases")]


def _check_space(file: GGUFModel, plan: Blueprint, target: Path) -> None:
    needed = sum(_written_bytes(entry) for item in plan.tensors for entry in _tensor_entries(file, item))
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ModelError(
            f"converting {file.path.name} needs {format_bytes(needed)} in the models folder, "
            f"which has {format_bytes(free)} free"
        )


def _written_bytes(entry: TensorEntry) -> int:
    weights = math.prod(entry.shape)
    if entry.type in BLOCK_BITS:
        return entry.size
    bits = PACKED_BITS.get(entry.type)
    if bits:
        return weights * bits // 8 + weights // QUANT_GROUP * 8
    return weights * (4 if entry.type == Kind.F32 else 2)


def _converted_tensors(file: GGUFModel, plan: Blueprint, progress: Progress) -> Iterator[list[NamedTensor]]:
    """Each module's tensors in turn."""
    sizes = [sum(entry.size for entry in _tensor_entries(file, item)) for item in plan.tensors]
    done, total = 0, sum(sizes)
    message = f"converting {file.path.name}"
    for item, size in zip(plan.tensors, sizes, strict=True):
        progress(message, done, total)
        if len(item.target_shape) == 1 or item.convert is not None:
            yield [_float_numbers(file, item)]
        elif _is_packed(file, item):
            yield _packed_matrix(file, item)
        elif _stays_in_blocks(file, item):
            yield [_raw_blocks(file, item)]
        elif item.join is not None:
            entries = _tensor_entries(file, item)
            parts = [_check_finite(each, _dequantized_floats([each], item).reshape(each.shape)) for each in entries]
            yield [NamedTensor(item.target, item.join(parts))]
        else:
            yield [_dense_matrix(file, item)]
        done += size
    progress(message, total, total)


def _float_numbers(file: GGUFModel, item: WantedTensor) -> NamedTensor:
    """Norms and biases: few numbers that matter much, so float32."""
    (entry,) = _tensor_entries(file, item)
    rows = math.prod(entry.shape[:-1])
    values = dequantize_rows(entry.rows(0, rows), entry.type).astype(np.float32)
    if len(item.target_shape) == 1:
        values = values.ravel()
        values = values[_row_order(item, 0, len(values)) if item.rows is None else item.rows]
    if item.convert is not None:
        values = item.convert(_check_finite(entry, values))
    return NamedTensor(item.target, np.ascontiguousarray(_check_finite(entry, values).reshape(item.target_shape)))


def _packed_matrix(file: GGUFModel, item: WantedTensor) -> list[NamedTensor]:
    kind, (first, *_) = _quant_kind(file, item), _tensor_entries(file, item)
    chunks = [_in_column_order(pack_blocks(raw, kind), item) for raw in _chunks(file, item)]
    weight = _reshape_rows(item, [chunk.weight for chunk in chunks])
    scales = _reshape_rows(item, [chunk.scales for chunk in chunks])
    if kind == Kind.MXFP4:
        if np.any(scales == 0xFF):
            raise _not_finite(first)
        return [NamedTensor(item.target, weight), NamedTensor(f"{item.module}.scales", scales)]
    scales = _check_finite(first, scales)
    biases = _check_finite(first, _reshape_rows(item, [chunk.biases for chunk in chunks if chunk.biases is not None]))
    dtype = max(narrowest_float(scales), narrowest_float(biases), key=lambda kind: kind(0).nbytes)
    return [
        NamedTensor(item.target, weight),
        NamedTensor(f"{item.module}.scales", scales.astype(dtype)),
        NamedTensor(f"{item.module}.biases", biases.astype(dtype)),
    ]


def _in_column_order(packed: PackedRows, item: WantedTensor) -> PackedRows:
    if item.columns is None:
        return packed
    order = _group_order(item)
    assert order is not None, "whole groups are moved"
    words = packed.weight.reshape(len(packed.weight), len(order), -1)[:, order].reshape(len(packed.weight), -1)
    return PackedRows(words, packed.scales[:, order], None if packed.biases is None else packed.biases[:, order])


def _reshape_rows(item: WantedTensor, chunks: list[np.ndarray]) -> np.ndarray:
    """Chunks of rows, in the tensor's own shape."""
    return np.concatenate(chunks).reshape(*item.target_shape[:-1], -1)


def _raw_blocks(file: GGUFModel, item: WantedTensor) -> NamedTensor:
    """As they are in the file, row by row."""
    raw = _reshape_rows(item, list(_chunks(file, item)))
    _check_finite(_tensor_entries(file, item)[0], block_units(raw, _quant_kind(file, item)))
    return NamedTensor(item.target, raw)


def _dense_matrix(file: GGUFModel, item: WantedTensor) -> NamedTensor:
    entries = _tensor_entries(file, item)
    columns = slice(None) if item.columns is None else item.columns
    if entries[0].type == Kind.BF16:
        bits = np.concatenate([raw.view("<u2")[:, columns] for raw in _chunks(file, item)]).reshape(item.target_shape)
        if np.any(bits & 0x7F80 == 0x7F80):
            raise _not_finite(entries[0])
        return NamedTensor(item.target, bits, bfloat16=True)
    values = _check_finite(entries[0], _dequantized_floats(entries, item))
    return NamedTensor(item.target, np.ascontiguousarray(values[:, columns]).reshape(item.target_shape))


def _dequantized_floats(entries: list[TensorEntry], item: WantedTensor) -> np.ndarray:
    """F16 and F32 rows as they are; quantised ones as float16, or as float32 where that overflows."""
    kind = entries[0].type

    def rows() -> Iterator[np.ndarray]:
        return (dequantize_rows(raw, kind) for entry in entries for raw in _chunks_of(entry, item))

    if kind not in (Kind.F16, Kind.F32):
        try:
            with np.errstate(over="raise"):
                return np.concatenate([chunk.astype(np.float16) for chunk in rows()])
        except FloatingPointError:
            pass
    return np.concatenate(list(rows()))


def _chunks(file: GGUFModel, item: WantedTensor) -> Iterator[np.ndarray]:
    for entry in _tensor_entries(file, item):
        for raw in _chunks_of(entry, item):
            kind = _quant_kind(file, item)
            yield raw if kind == entry.type else quantize(dequantize_rows(raw, entry.type), kind)


def _chunks_of(entry: TensorEntry, item: WantedTensor) -> Iterator[np.ndarray]:
    """The rows of a tensor, in the model's order, as many at a time as memory allows."""
    rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
    if item.rows is not None:
        step = max(1, CHUNK_WEIGHTS // columns)
        for start in range(0, len(item.rows), step):
            chosen = item.rows[start : start + step]
            first = int(chosen.min())
            yield entry.rows(first, int(chosen.max()) + 1)[chosen - first]
        return
    head = rows // item.heads if item.heads else 1
    step = max(1, CHUNK_WEIGHTS // (columns * head)) * head
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield entry.rows(start, stop)[_row_order(item, start, stop)]


def _row_order(item: WantedTensor, start: int, stop: int) -> np.ndarray | slice:
    """Which of the rows [start, stop) comes first, second... `start` and `stop` are at the edge of a head."""
    if not item.heads:
        return slice(None)
    return rope_head_order(stop - start, item.shape[0] // item.heads)


def _check_finite(entry: TensorEntry, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise _not_finite(entry)
    return values


def _not_finite(entry: TensorEntry) -> ModelError:
    return ModelError(f"tensor {entry.name!r} holds numbers that are not finite: the file is damaged")


def _write_configs(file: GGUFModel, plan: Blueprint, tokenizer: TokenizerFiles, target: Path) -> None:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    stated_ids = {key: value for key, value in ids.items() if value is not None}
    formats = {FILE_TYPE_KEY: _file_type(file)} | _moved_formats(file, plan)
    modules = _quantization(file, plan) | _block_modules(file, plan)
    _write_json(target / "config.json", plan.config | stated_ids | formats | modules)
    _write_json(target / "generation_config.json", stated_ids | _recommended_sampling(file))
    limit = {"model_max_length": plan.config["max_position_embeddings"]}
    _write_json(target / "tokenizer_config.json", tokenizer.config | limit)
    tokenizer.tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    for name, template in tokenizer.named_templates.items():
        folder = target / "additional_chat_templates"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.jinja").write_text(template, encoding="utf-8")


def _recommended_sampling(file: GGUFModel) -> dict[str, Any]:
    """The sampling that the file recommends."""
    general = Hyperparameters(file, "general")
    return {
        name: general.get(key) if isinstance(general.get(key), int) else general.number(key)
        for key, name in SAMPLING_KEYS.items()
        if general.get(key) is not None
    }


def _file_type(file: GGUFModel) -> str:
    """What people call the file's mixture of formats, as Q4_K_M; else the format that most of its weights have."""
    file_type = file.metadata.get("general.file_type")
    if file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    weights: Counter[str] = Counter()
    for entry in file.tensors.values():
        weights[entry.type.name] += math.prod(entry.shape)
    return weights.most_common(1)[0][0]


def _moved_formats(file: GGUFModel, plan: Blueprint) -> dict[str, Any]:
    """The formats of packed weights that change some of their values."""
    kinds = sorted({_quant_kind(file, item) for item in plan.tensors if _is_packed(file, item)} & LATTICE_ERRORS.keys())
    formats = {
        kind.name: {"bits": PACKED_BITS[kind], "percent": round(100 * LATTICE_ERRORS[kind], 1)} for kind in kinds
    }
    return {MOVED_KEY: formats} if formats else {}


def _quantization(file: GGUFModel, plan: Blueprint) -> dict[str, Any]:
    """The commonest form, and an entry for each module with another form, or with none."""
    kinds = {
        item.module: _quant_kind(file, item) if _is_packed(file, item) else None
        for item in plan.tensors
        if len(item.target_shape) > 1 and not item.plain
    }
    forms = {module: packed_format(kind) if kind is not None else None for module, kind in kinds.items()}
    counted = Counter(json.dumps(form) for form in forms.values() if form)
    if not counted:
        return {}
    usual = json.loads(counted.most_common(1)[0][0])
    others = {module: form or False for module, form in forms.items() if form != usual}
    return {"quantization": usual | others}


def _block_modules(file: GGUFModel, plan: Blueprint) -> dict[str, Any]:
    """The modules whose weights stay in blocks, and of which kind."""
    modules = {item.module: _quant_kind(file, item).name for item in plan.tensors if _stays_in_blocks(file, item)}
    return {BLOCKS_KEY: modules} if modules else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

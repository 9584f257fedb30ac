"""Model folders whose experts are records: gate, up and down of an expert beside each other, from page to page.

In other folders the experts of a layer are a tensor of each projection, and an expert is read in as many pieces. Here
one read brings it, and it may go past the system's page cache. A record tensor [experts, bytes] says in its file's
metadata what is in it. mlx-lm does not know it: such folders are for ingot alone, with or without `--expert-memory`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ingot.errors import ConfigError, ModelError
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.experts.files import ExpertFiles, padded
from ingot.models.experts.loading import find_experts
from ingot.models.experts.weights import StoredExperts
from ingot.models.files.folder_checks import EXPERT_RECORDS, RECORD_LAYOUT
from ingot.models.files.model_config import older_config_names
from ingot.models.files.progress import Progress, format_bytes
from ingot.upstream import load_config, load_model


def write_expert_records(folder: Path, target: Path, progress: Progress) -> None:
    """Write the weights of the model in `folder` to the folder `target`, its experts as records. Raises ConfigError for
    a model that has none, and ModelError for one whose experts cannot be told apart."""
    model, stored = _loaded(folder)
    files = ExpertFiles(folder)
    try:
        layers = find_experts(model, stored, files)
        if not layers:
            raise ConfigError("experts: the model has no mixture of experts: leave it out", param="experts")
        if files.records:
            raise ConfigError("experts: the model's experts lie beside each other already", param="experts")
        progress(f"writing {format_bytes(sum(each.count * each.bytes_of_one for each in layers))} of experts")
        for number, layer in enumerate(layers):
            _write_layer(target / f"model-experts-{number:05}.safetensors", layer, files)
        _write_rest(target, stored, layers, files)
    finally:
        files.close()
    _check(model, target, layers)


def _loaded(folder: Path) -> tuple[Any, dict[str, mx.array]]:
    stored = dict[str, mx.array]()
    stated = load_config(folder)
    classes = model_classes_for(folder, stated)
    try:
        model, _ = load_model(folder, model_config=older_config_names(stated), get_model_classes=classes, stored=stored)
    # The code of a hundred families reads this folder and may fail in any way; one exits.
    except (Exception, SystemExit) as error:
        raise ModelError(f"{folder.name} cannot be read: {error}") from error
    return model, stored


def _write_layer(file: Path, layer: StoredExperts, files: ExpertFiles) -> None:
    def fill(expert: int, parts: Sequence[memoryview]) -> None:
        for part, into in zip(layer.parts, parts, strict=True):
            files.read(part.ranges[expert], [into])

    arrays = [(part.projection, part.name, part.dtype, part.shape) for part in layer.parts]
    write_record_file(file, layer.path, layer.count, arrays, fill)


def write_record_file(
    file: Path,
    path: str,
    count: int,
    arrays: Sequence[tuple[str, str, mx.Dtype, Sequence[int]]],
    fill: Callable[[int, Sequence[memoryview]], None],
) -> None:
    """The experts of the layer at that path in the model. `arrays` are (projection, name, dtype, shape) of those of one
    expert; `fill` writes them to memory, by the expert's number."""
    sizes = [math.prod(shape) * dtype.size for _, _, dtype, shape in arrays]
    size = padded(sum(sizes))
    layout = [[projection, name, _dtype_name(dtype), list(shape)] for projection, name, dtype, shape in arrays]
    tensor = {"dtype": "U8", "shape": [count, size], "data_offsets": [0, count * size]}
    metadata = {"format": "ingot", RECORD_LAYOUT: json.dumps({path: layout})}
    header = json.dumps({"__metadata__": metadata, f"{path}.{EXPERT_RECORDS}": tensor}).encode()
    header += b" " * (padded(8 + len(header)) - 8 - len(header))  # so that records begin where pages do
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for expert in range(count):
            held, ends = memoryview(bytearray(size)), list(accumulate(sizes))
            fill(expert, [held[end - own : end] for end, own in zip(ends, sizes, strict=True)])
            stream.write(held)


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _write_rest(target: Path, stored: dict[str, mx.array], layers: Sequence[StoredExperts], files: ExpertFiles) -> None:
    """All tensors that experts are no part of, each in a file of the same name as before."""
    taken = sorted((place.file, place.offset) for layer in layers for part in layer.parts for place in part.ranges)
    rest: dict[str, dict[str, mx.array]] = {}
    for name, (number, tensor) in files.tensors.items():
        at = bisect_left(taken, (number, tensor.offset))
        if at == len(taken) or taken[at] >= (number, tensor.offset + tensor.nbytes):
            rest.setdefault(tensor.file.name, {})[name] = stored[name]
    for file, tensors in rest.items():
        mx.save_safetensors(str(target / file), tensors, {"format": "mlx"})


def _check(model: Any, target: Path, layers: Sequence[StoredExperts]) -> None:
    """Raises ModelError unless the folder gives the same model: its code may want tensors as they were."""
    again, _ = _loaded(target)
    before, after = dict(tree_flatten(model.parameters())), dict(tree_flatten(again.parameters()))
    first = layers[0]
    same = before.keys() == after.keys() and all(
        (array.shape, array.dtype) == (after[name].shape, after[name].dtype) for name, array in before.items()
    )
    compared = [f"{first.path}.{part.projection}.{part.name}" for part in first.parts]
    if not same or not all(mx.array_equal(before[name], after[name], equal_nan=True).item() for name in compared):
        raise ModelError(
            f"The experts of {target.name} cannot be laid beside each other: its family's code reads others"
        )

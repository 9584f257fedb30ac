"""How much memory a model takes, from its files' headers, before a weight is read.

A language model is built as it would be loaded, but lazily: its arrays have shapes and no memory. So is a step of one
token, after which its caches have the size of a token's KV. Embedding, rerank, speech-to-text and text-to-speech models
are measured by their configs. `memory_needs` returns None for what cannot be known without loading; the others raise
ModelError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_unflatten

from ingot.cache.attention_state import KVLayout
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.media import worker
from ingot.models.checkpoint import CheckpointConfig, checkpoint_files
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.families.registry import attention_spec_of
from ingot.models.files.folder_checks import read_safetensors_header, stated_context
from ingot.models.files.model_config import older_config_names
from ingot.models.gguf.architectures import read_blueprint
from ingot.models.gguf.file import GGUFModel, TensorEntry
from ingot.models.gguf.quant_types import BLOCK_BITS, BLOCKS_KEY, PACKED_BITS, QUANT_GROUP, Kind
from ingot.models.gguf.weights import is_block_layer, plain_stand_in
from ingot.models.kokoro import KokoroModel
from ingot.models.kokoro_acoustic import KokoroConfig
from ingot.models.layers.attention_setup import layer_numbers, layouts_of, reads_stored_kv
from ingot.models.layers.fused_layers import plain_programs_of
from ingot.models.layers.modules import named_parameters
from ingot.models.pooling_models.encoder import encoder_batch_bytes
from ingot.models.pooling_models.loading import ENCODER_FAMILIES, read_model_config
from ingot.models.precision import block_bytes, settled_bytes
from ingot.models.vision.loading import has_vision_tower, unloaded_tower_needs, unloaded_tower_parts
from ingot.models.vision.tower import EncodingBytes
from ingot.models.whisper import read_whisper_model
from ingot.upstream import SwitchGLU, SwitchMLP, caches, load_config, load_model, model_classes

BATCH_TOKENS: Final = 4096
"""Tokens of a batch that an encoder has memory for."""
LONGEST_INPUT: Final = 8192
"""Tokens of a single input that it has memory for, if its context is as long."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes. KV is that of one sequence; without a window it grows with each token."""

    weights: int
    per_token: int
    at_full_context: int
    context: int
    experts: int = 0  # of the weights, those of a mixture's experts, which need not all be in memory
    tower: int = 0  # of the weights, those of its vision tower: `--text-only` leaves them out


def memory_needs(path: Path, device: Device) -> MemoryNeeds | None:
    """Of a model folder or a .gguf file; None where that cannot be known without loading it."""
    try:
        return _gguf_needs(path, device) if path.suffix == ".gguf" else _folder_needs(path, device)
    # The code of a hundred families reads this and may fail in any way; one exits.
    except (Exception, SystemExit):
        return None


def _folder_needs(folder: Path, device: Device) -> MemoryNeeds:
    stated = load_config(folder)
    classes = model_classes_for(folder, stated)
    model, config = load_model(folder, model_config=older_config_names(stated), get_model_classes=classes)
    needs = _needs_of_model(model, config, settled_bytes(model, device), device)
    tower = _tower_weight_bytes(folder, device)
    experts = sum(
        settled_bytes(module, device) for module in model.modules() if isinstance(module, SwitchGLU | SwitchMLP)
    )
    return replace(needs, weights=needs.weights + tower, experts=experts, tower=tower)


def _tower_weight_bytes(folder: Path, device: Device) -> int:
    """0 where it has no tower, or cannot be served with it here."""
    config = load_config(folder)
    if not has_vision_tower(folder, config):
        return 0
    try:
        return sum(settled_bytes(part, device) for part in unloaded_tower_parts(folder, config))
    except ModelError:
        return 0


def largest_media_needs(folder: Path, device: Device) -> list[EncodingBytes] | None:
    """What encoding the largest image and a video takes; None where the model sees nothing here, or that cannot be
    known without loading it."""
    try:
        config = {} if folder.suffix == ".gguf" else load_config(folder)
        return unloaded_tower_needs(folder, config, device) if has_vision_tower(folder, config) else None
    except (Exception, SystemExit):  # see `memory_needs`
        return None


def _gguf_needs(path: Path, device: Device) -> MemoryNeeds:
    with GGUFModel(path) as file:
        config = read_blueprint(file).config
        weights = sum(_entry_bytes(entry, device) for entry in file.tensors.values())
        narrow = any(entry.type in BLOCK_BITS for entry in file.tensors.values())
    model_class, args_class = model_classes(config=config)
    model = model_class(args_class.from_dict(config))
    return _needs_of_model(model, {**config, BLOCKS_KEY: narrow}, weights, device)


def _needs_of_model(model: Any, config: dict[str, Any], weights: int, device: Device) -> MemoryNeeds:
    context = stated_context(config)
    layouts, is_native = _layouts(model, device)
    width = 2 if is_native else _state_width(model, config, device)
    stored = iter(layouts)
    per_token = full = 0
    for cache in _caches_after_one_token(model):
        if isinstance(cache, caches.ArraysCache):
            parts: list[Any] = cache.cache
            full += sum(part.size * max(width, 4) for part in parts if part is not None)
            continue
        layout = next(stored, None)
        arrays = (cache.keys, cache.values) if layout is None else layout.pack(cache.keys, cache.values)
        size = width * sum(math.prod(array.shape) // array.shape[2] for array in arrays)
        window = cache.max_size if isinstance(cache, caches.RotatingKVCache) else None
        per_token += size if window is None else 0
        full += size * min(context, window or context)
    return MemoryNeeds(weights, per_token, full, context)


def _caches_after_one_token(model: Any) -> Iterator[Any]:
    """The model's caches after one token, lazily."""
    blocks = [(path, plain_stand_in(module)) for path, module in model.named_modules() if is_block_layer(module)]
    model.update_modules(tree_unflatten(blocks))
    prompt_cache = caches.make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=prompt_cache)
    for cache in prompt_cache:
        yield from _parts_of(cache)


def _parts_of(cache: Any) -> Sequence[Any]:
    parts: Sequence[Any] = cache.caches if isinstance(cache, caches.CacheList) else [cache]
    return parts


def _state_width(model: Any, config: dict[str, Any], device: Device) -> int:
    """Bytes of a number in keys and values that the native kernels do not read."""
    if device.kind == "cpu":
        return 4
    floats = [array.itemsize for _, array in named_parameters(model) if mx.issubdtype(array.dtype, mx.floating)]
    return 2 if config.get(BLOCKS_KEY) else max(floats)


def _layouts(model: Any, device: Device) -> tuple[list[KVLayout | None], bool]:
    """How what each layer stores will lie in its pages; and whether the native kernels will read it, as 16-bit
    numbers."""
    reads_natively = device.kind == "cpu" and native.available()
    attention = [
        (layer_numbers(path), layouts_of(module, spec, is_native=reads_natively))
        for path, module in model.named_modules()
        if (spec := attention_spec_of(module)) is not None and not reads_stored_kv(module, spec)
    ]
    parts = [part for cache in caches.make_prompt_cache(model) for part in _parts_of(cache)]
    kv_caches = [part for part in parts if not isinstance(part, caches.ArraysCache)]
    layouts = [layout for _, own in sorted(attention, key=lambda each: each[0]) for layout in own]
    covered = bool(plain_programs_of(model)) or 0 < len(layouts) == len(kv_caches)
    return (layouts, reads_natively) if covered else ([], False)


def _entry_bytes(entry: TensorEntry, device: Device) -> int:
    """A tensor of a GGUF file, once it is converted and loaded."""
    count = math.prod(entry.shape)
    if len(entry.shape) > 1 and entry.type in BLOCK_BITS:
        return block_bytes(count, entry.type, device)
    if (device.kind == "cpu" and not native.available()) or len(entry.shape) == 1 or entry.type == Kind.F32:
        return count * 4
    if entry.type in PACKED_BITS:
        return count * PACKED_BITS[entry.type] // 8 + count // QUANT_GROUP * 4
    return count * 2


def speech_to_text_needs(folder: Path, device: Device) -> int:
    """Bytes of a Whisper model, of a window that it transcribes, and of decoding audio. Raises ModelError."""
    model, config = read_whisper_model(folder)
    return settled_bytes(model, device) + config.window_bytes + worker.header_pool.memory + worker.audio_pool.memory


def text_to_speech_needs(folder: Path, device: Device) -> int:
    """Bytes of a Kokoro model, which is float32 wherever it runs, and of a piece of speech. Raises ModelError."""
    config = KokoroConfig.read(folder)
    weights = sum(array.size for _, array in named_parameters(KokoroModel(config)))
    voices = [one for file in folder.glob("voices/*.safetensors") for one in read_safetensors_header(file).values()]
    return 4 * (weights + sum(math.prod(one.shape) for one in voices)) + config.piece_bytes


def pooling_model_needs(folder: Path, device: Device) -> int:
    """Bytes of an encoder and of a batch. Raises ModelError."""
    config = read_model_config(folder)
    stated = CheckpointConfig({**config, **(config.get("text_config") or {})})
    length = min(stated_context(config), LONGEST_INPUT)
    tokens = max(length, BATCH_TOKENS)
    batch = encoder_batch_bytes(
        tokens,
        length,
        hidden=stated.number("hidden_size"),
        inner=stated.number("intermediate_size"),
        heads=stated.number("num_attention_heads"),
    )
    decoder = None if config.get("model_type") in ENCODER_FAMILIES else memory_needs(folder, device)
    if decoder is None:
        return _most_weight_bytes(folder, device) + batch
    return decoder.weights + batch + tokens * decoder.per_token


def _most_weight_bytes(folder: Path, device: Device) -> int:
    """The most that weights take: a CPU may widen them."""
    tensors = [one for file in checkpoint_files(folder) for one in read_safetensors_header(file).values()]
    return sum(max(one.nbytes, 4 * math.prod(one.shape)) if device.kind == "cpu" else one.nbytes for one in tensors)

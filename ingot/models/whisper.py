"""Whisper, a speech-to-text model: windows of audio in, logits of tokens out.

`Whisper` is the model behind one interface; only the engine thread may run one. It computes in parts, with time for
other requests between them. The modules have the names of its checkpoints; one window is computed at a time, so nothing
has a batch axis. Weights come under Hugging Face's names or as MLX's converters write them, plain or quantised.
`load_whisper` raises ModelError with what is wrong with the folder.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.media.audio import FloatArray
from ingot.models import checkpoint
from ingot.models.checkpoint import CheckpointConfig
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.norms import swap_gelus
from ingot.models.pooling_models.encoder import module_bytes
from ingot.models.pooling_models.loading import read_model_config
from ingot.models.precision import settle_precision
from ingot.models.whisper_convert import hugging_face_config, hugging_face_name

EncodedWindow: TypeAlias = "list[tuple[mx.array, mx.array]]"
"""Keys and values of a window, layer by layer."""
WhisperWork: TypeAlias = "Generator[None, None, mx.array]"
"""Computes part by part and returns the result."""

TOKENS_READ_AT_ONCE = 32
"""Tokens that are computed between two yields."""
WHISPER_PART_FLOPS = 7e8
"""About what the encoder computes between two yields: some 20 ms of one core."""
WINDOW_POSITIONS = 1500
"""Of 30 seconds, as every Whisper model is trained with."""
WHISPER_UNNEEDED = (r"^proj_out\.",)
ALIGNMENT_HEADS_KEY, POSITIONS_KEY = "alignment_heads", "encoder.embed_positions.weight"


def load_whisper(folder: Path, device: Device, *, dtype: str | None = None) -> Whisper:
    """The model in `folder`. Raises ModelError with what is wrong with it."""
    model, config = read_whisper_model(folder)
    notes = settle_precision(model, device, dtype)
    if native.available():
        swap_gelus(model)
    mx.eval(model.parameters())
    return Whisper(model, config, notes)


class Whisper:
    def __init__(self, model: WhisperModel, config: WhisperConfig, notes: Sequence[str] = ()) -> None:
        self._model, self.config, self.notes = model, config, tuple(notes)
        self.context = config.context

    def encode(self, frames: FloatArray) -> Generator[None, None, EncodedWindow]:
        """Encode a window of [2 * positions, mels] frames."""
        # The dtype of norms is that of activations: weights may be narrower.
        dtype = self._model.encoder.layer_norm.weight.dtype
        states = yield from self._model.encoder.run(mx.array(frames).astype(dtype))
        window = []
        for layer in self._model.decoder.layers:
            pair = layer.encoder_attn.keys_and_values(states)
            mx.eval(pair)
            window.append(pair)
            yield
        return window

    def write(self, window: EncodedWindow) -> WhisperTranscription:
        return WhisperTranscription(self._model, self.config, window)

    def rest(self) -> None:
        """Frees the memory that MLX caches for the next window."""
        mx.clear_cache()

    @property
    def weight_bytes(self) -> int:
        return module_bytes([self._model])

    @property
    def dtype(self) -> str:
        return str(max(named_parameters(self._model), key=lambda found: found[1].size)[1].dtype).rsplit(".", 1)[-1]

    @property
    def window_bytes(self) -> int:
        """The most memory that a window takes while it is transcribed."""
        return self.config.window_bytes


class WhisperTranscription:
    """A transcript of one window. Setting `length` to less drops the later tokens."""

    def __init__(self, model: WhisperModel, config: WhisperConfig, window: EncodedWindow) -> None:
        self._decoder, self._config, self._window = model.decoder, config, window
        self._caches = model.decoder.new_caches(window[0][0].dtype)

    @property
    def length(self) -> int:
        return self._caches[0].length

    @length.setter
    def length(self, length: int) -> None:
        for cache in self._caches:
            cache.length = length

    def push(self, tokens: Sequence[int], asked: Sequence[int]) -> FloatArray:
        """Append tokens. Returns the logits after those at the indices `asked`, [asked, vocabulary]."""
        hidden = self._decoder.hidden(mx.array(list(tokens)), self._caches, self._window)
        if not asked:
            mx.eval(hidden)
            return np.zeros((0, self._config.vocab), np.float32)
        return np.array(self._decoder.logits(hidden[mx.array(list(asked))]))

    def attention(self, tokens: Sequence[int]) -> Generator[None, None, FloatArray]:
        """The attention scores of tokens over the audio, in the alignment heads: [heads, tokens, positions]."""
        self.length = 0
        parts: list[Any] = []
        for begin in range(0, len(tokens), TOKENS_READ_AT_ONCE):
            scores: list[mx.array] = []
            self._decoder.hidden(
                mx.array(list(tokens[begin : begin + TOKENS_READ_AT_ONCE])), self._caches, self._window, scores
            )
            parts.append(np.stack([np.array(scores[layer][head]) for layer, head in self._config.alignment_heads]))
            yield
        return np.concatenate(parts, axis=1)


class WhisperConvolution(nn.Module):
    """Over three neighbours in time, as one product: MLX's own is slow on CPUs."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.weight = mx.zeros((outputs, inputs, 3))
        self.bias = mx.zeros((outputs,))
        self._stride = stride

    def __call__(self, x: mx.array) -> mx.array:
        padded = mx.pad(x, [(1, 1), (0, 0)])
        taps = mx.concatenate([padded[at : at + x.shape[0] : self._stride] for at in range(3)], axis=-1)
        return taps @ self.weight.transpose(2, 1, 0).reshape(-1, self.weight.shape[0]) + self.bias


class WhisperAttention(nn.Module):
    """Queries, keys and values are [length, heads, size]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self._heads = heads

    def queries(self, x: mx.array) -> mx.array:
        return self.q_proj(x).reshape(x.shape[0], self._heads, -1)

    def keys_and_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (project(x).reshape(x.shape[0], self._heads, -1) for project in (self.k_proj, self.v_proj))
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None) -> mx.array:
        return self.out_proj(attend_whisper(queries, keys, values, mask).reshape(queries.shape[0], -1))


def attend_whisper(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    if mask is None and queries.dtype == mx.float32 and native.can_attend_segments():
        return native.attend_segments(queries[None], keys[None], values[None], scale)[0]
    by_head = (each[None].swapaxes(1, 2) for each in (queries, keys, values))
    return mx.fast.scaled_dot_product_attention(*by_head, scale=scale, mask=mask)[0].swapaxes(0, 1)


class WhisperLayer(nn.Module):
    """What layers of the encoder and of the decoder share."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.self_attn = WhisperAttention(width, heads)
        self.final_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.activation = nn.GELU()

    def mlp(self, x: mx.array) -> mx.array:
        return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))


class WhisperEncoderLayer(WhisperLayer):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config.width, config.encoder_heads, config.encoder_inner)

    def run(self, x: mx.array, rows: int) -> WhisperWork:
        """Computes `rows` positions at a time."""
        normed = self.self_attn_layer_norm(x)
        keys, values = self.self_attn.keys_and_values(normed)
        mx.eval(keys, values)
        yield
        done = []
        for begin in range(0, x.shape[0], rows):
            part = slice(begin, begin + rows)
            attended = x[part] + self.self_attn.attend(self.self_attn.queries(normed[part]), keys, values)
            done.append(self.mlp(attended))
            mx.eval(done[-1])
            yield
        return mx.concatenate(done)


class WhisperEncoder(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = WhisperConvolution(config.mels, config.width, 1)
        self.conv2 = WhisperConvolution(config.width, config.width, 2)
        self.embed_positions = nn.Embedding(config.positions, config.width)
        self.layers = [WhisperEncoderLayer(config) for _ in range(config.encoder_layers)]
        self.layer_norm = nn.LayerNorm(config.width)
        self.activation = nn.GELU()
        self._rows = part_rows(config)

    def run(self, mels: mx.array) -> WhisperWork:
        """The states [positions, width] of a window [frames, mels]."""
        x = self.activation(self.conv1(mels))
        mx.eval(x)
        yield
        x = self.activation(self.conv2(x)) + self.embed_positions.weight
        mx.eval(x)
        yield
        for layer in self.layers:
            x = yield from layer.run(x, self._rows)
        return self.layer_norm(x)


def part_rows(config: WhisperConfig) -> int:
    """Positions of one layer that take about WHISPER_PART_FLOPS."""
    products = 2 * config.width * (2 * config.width + 2 * config.encoder_inner)
    attention = 4 * config.positions * config.width
    return max(16, min(config.positions, int(WHISPER_PART_FLOPS / (products + attention))))


class WhisperDecoderLayer(WhisperLayer):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config.width, config.decoder_heads, config.decoder_inner)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.width)
        self.encoder_attn = WhisperAttention(config.width, config.decoder_heads)

    def attend_to_tokens(self, x: mx.array, cache: WhisperDecoderCache, mask: mx.array | None) -> mx.array:
        normed = self.self_attn_layer_norm(x)
        keys, values = cache.extend(*self.self_attn.keys_and_values(normed))
        return x + self.self_attn.attend(self.self_attn.queries(normed), keys, values, mask)


class WhisperDecoderCache:
    """Keys and values of one layer's tokens, with room for all that there may be."""

    def __init__(self, heads: int, size: int, room: int, dtype: mx.Dtype) -> None:
        self._keys, self._values = (mx.zeros((room, heads, size), dtype) for _ in range(2))
        self.length = 0

    def extend(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        begin, self.length = self.length, self.length + keys.shape[0]
        self._keys[begin : self.length] = keys
        self._values[begin : self.length] = values
        return self._keys[: self.length], self._values[: self.length]


class WhisperDecoder(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width)
        self.layers = [WhisperDecoderLayer(config) for _ in range(config.decoder_layers)]
        self.layer_norm = nn.LayerNorm(config.width)
        self._heads, self._size, self._room = config.decoder_heads, config.width // config.decoder_heads, config.context

    def new_caches(self, dtype: mx.Dtype) -> list[WhisperDecoderCache]:
        return [WhisperDecoderCache(self._heads, self._size, self._room, dtype) for _ in self.layers]

    def hidden(
        self,
        tokens: mx.array,
        caches: list[WhisperDecoderCache],
        window: EncodedWindow,
        scores: list[mx.array] | None = None,
    ) -> mx.array:
        """The states of tokens that follow the cached ones. `scores` gets each layer's attention scores over the audio,
        [heads, tokens, positions]."""
        begin, count = caches[0].length, tokens.shape[0]
        x = self.embed_tokens(tokens) + self.embed_positions.weight[begin : begin + count]
        mask = causal_mask(begin, count).astype(x.dtype) if count > 1 else None
        for layer, cache, (keys, values) in zip(self.layers, caches, window, strict=True):
            x = layer.attend_to_tokens(x, cache, mask)
            queries = layer.encoder_attn.queries(layer.encoder_attn_layer_norm(x))
            if scores is not None:
                scores.append(queries.swapaxes(0, 1) * queries.shape[-1] ** -0.5 @ keys.transpose(1, 2, 0))
            x = layer.mlp(x + layer.encoder_attn.attend(queries, keys, values))
        return self.layer_norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.embed_tokens.as_linear(hidden).astype(mx.float32)


def causal_mask(begin: int, count: int) -> mx.array:
    """A mask of `count` tokens after `begin` others."""
    later = mx.arange(begin + count)[None, :] > (begin + mx.arange(count))[:, None]
    return mx.where(later, -1e4, 0.0)


class WhisperModel(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    mels: int
    positions: int  # of a window: half as many as frames
    width: int
    vocab: int
    context: int  # the most tokens of the decoder
    encoder_layers: int
    encoder_heads: int
    encoder_inner: int
    decoder_layers: int
    decoder_heads: int
    decoder_inner: int
    alignment_heads: tuple[tuple[int, int], ...]  # [layer, head] of the attention that follows the audio in time
    quantization: dict[str, Any] = field(default_factory=dict)  # of quantised weights

    @classmethod
    def read(cls, folder: Path) -> WhisperConfig:
        """Raises ModelError for a folder that holds another kind of model."""
        config = read_model_config(folder)
        if config.get("model_type") != "whisper":
            raise ModelError(
                f"{folder.name} is a model of type {config.get('model_type')!r}; a speech-to-text model has to be a "
                "Whisper model, such as whisper-tiny.en"
            )
        if "n_audio_state" in config:
            config |= _hugging_face_config_of(config, folder)
        stated = CheckpointConfig(config)
        number = stated.number
        layers, positions = number("decoder_layers"), number("max_source_positions")
        if positions != WINDOW_POSITIONS:
            raise ModelError(
                f"{folder.name} has windows of {positions} positions; Whisper's windows have {WINDOW_POSITIONS} here"
            )
        return cls(
            mels=number("num_mel_bins"),
            positions=positions,
            width=number("d_model"),
            vocab=number("vocab_size"),
            context=number("max_target_positions"),
            encoder_layers=number("encoder_layers"),
            encoder_heads=number("encoder_attention_heads"),
            encoder_inner=number("encoder_ffn_dim"),
            decoder_layers=layers,
            decoder_heads=number("decoder_attention_heads"),
            decoder_inner=number("decoder_ffn_dim"),
            alignment_heads=_alignment_heads(folder, layers, number("decoder_attention_heads")),
            quantization=stated.quantization(),
        )

    @property
    def window_bytes(self) -> int:
        """The most memory that a window takes while it is transcribed."""
        states = 4 * self.positions * self.width
        encoding = 12 * states + 8 * self.positions * self.encoder_inner
        scores = 3 * 4 * self.encoder_heads * self.positions * self.positions
        caches = 2 * self.decoder_layers * (states + 4 * self.context * self.width)
        return encoding + scores + caches + 16 * self.vocab


def _hugging_face_config_of(dims: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config of MLX's converters, in Hugging Face's names."""
    try:
        return hugging_face_config(dims)
    except (KeyError, TypeError) as error:
        raise ModelError(f"config.json of {folder.name} states no {error}") from error


def _alignment_heads(folder: Path, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Those that the files name; else all of the upper half of layers, as the reference has it."""
    named = _generation_config(folder).get("alignment_heads")
    if named is None:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    return alignment_head_pairs(named, layers, heads, folder.name)


def alignment_head_pairs(named: Any, layers: int, heads: int, whose: str) -> tuple[tuple[int, int], ...]:
    """Raises ModelError where `named` are no heads of the model."""
    try:
        found = tuple((int(layer), int(head)) for layer, head in named)
    except (TypeError, ValueError) as error:
        raise ModelError(f"alignment_heads of {whose} are no pairs of numbers") from error
    if not found or not all(0 <= layer < layers and 0 <= head < heads for layer, head in found):
        raise ModelError(f"alignment_heads of {whose} name heads that the model does not have")
    return found


def _generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"generation_config.json of {folder.name} cannot be read: {error}") from error
    return read if isinstance(read, dict) else {}


def read_whisper_model(folder: Path) -> tuple[WhisperModel, WhisperConfig]:
    """The model in `folder`, with lazy weights. Raises ModelError."""
    config = WhisperConfig.read(folder)
    model = WhisperModel(config)
    found = checkpoint.with_current_names(checkpoint.read_checkpoint_tensors(folder), drop="model.")
    if any(".blocks." in name for name in found):
        found = _as_hugging_face(found, config)
        if (heads := found.pop(ALIGNMENT_HEADS_KEY, None)) is not None:
            pairs = alignment_head_pairs(heads.tolist(), config.decoder_layers, config.decoder_heads, folder.name)
            config = replace(config, alignment_heads=pairs)
    if config.quantization:
        _quantize_whisper(model, found, config.quantization, folder)
    checkpoint.load_tensors(model, found, unneeded=WHISPER_UNNEEDED, whose=folder.name)
    return model, config


def _as_hugging_face(found: Mapping[str, mx.array], config: WhisperConfig) -> dict[str, mx.array]:
    """MLX's convolutions have their inputs last, and MLX's converters leave out the encoder's positions."""
    named = {hugging_face_name(name): tensor for name, tensor in found.items()}
    for name in ("encoder.conv1.weight", "encoder.conv2.weight"):
        if name in named and named[name].ndim == 3:
            named[name] = named[name].swapaxes(1, 2)
    return {POSITIONS_KEY: sinusoids(config.positions, config.width), **named}


def sinusoids(length: int, width: int) -> mx.array:
    """Sines and cosines of positions, in periods from 2 pi to 10,000 times that."""
    steps = mx.arange(width // 2) * (mx.log(mx.array(10_000.0)) / (width // 2 - 1))
    angles = mx.arange(length)[:, None] * mx.exp(-steps)
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=1)


def _quantize_whisper(model: nn.Module, found: Mapping[str, mx.array], form: Mapping[str, Any], folder: Path) -> None:
    """Quantise the layers whose weights are quantised."""
    own_forms = {hugging_face_name(f"{path}."): own for path, own in form.items() if isinstance(own, dict)}

    def form_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        can_be = isinstance(module, nn.Linear) or path.endswith("embed_tokens")
        return own_forms.get(f"{path}.", True) if can_be and f"{path}.scales" in found else False

    try:
        nn.quantize(model, form["group_size"], form["bits"], mode=form.get("mode", "affine"), class_predicate=form_of)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The weights of {folder.name} are quantised in a form that MLX does not support: {error}"
        ) from error

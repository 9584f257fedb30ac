"""Whisper's modules, under the names of its checkpoints. One window is computed at a time, so nothing has rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels import native
from ingot.models.whisper_config import WhisperConfig

Work: TypeAlias = "Generator[None, None, mx.array]"
"""Done part by part; the end's value is what it comes to."""
PART_FLOPS = 7e8
"""About what the encoder computes between two looks at the clock: some 20 ms of one core."""


class Convolution(nn.Module):
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


class Attention(nn.Module):
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

    def pair(self, x: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (project(x).reshape(x.shape[0], self._heads, -1) for project in (self.k_proj, self.v_proj))
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None) -> mx.array:
        return self.out_proj(attended(queries, keys, values, mask).reshape(queries.shape[0], -1))


def attended(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    if mask is None and queries.dtype == mx.float32 and native.attends_segments():
        return native.attend_segments(queries[None], keys[None], values[None], scale)[0]
    by_head = (each[None].swapaxes(1, 2) for each in (queries, keys, values))
    return mx.fast.scaled_dot_product_attention(*by_head, scale=scale, mask=mask)[0].swapaxes(0, 1)


class EncoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.self_attn = Attention(config.width, config.encoder_heads)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.encoder_inner)
        self.fc2 = nn.Linear(config.encoder_inner, config.width)
        self.activation = nn.GELU()

    def run(self, x: mx.array, rows: int) -> Work:
        """A part of the work is done for `rows` positions at a time."""
        normed = self.self_attn_layer_norm(x)
        keys, values = self.self_attn.pair(normed)
        mx.eval(keys, values)
        yield
        done = []
        for begin in range(0, x.shape[0], rows):
            part = slice(begin, begin + rows)
            seen = x[part] + self.self_attn.attend(self.self_attn.queries(normed[part]), keys, values)
            done.append(seen + self.fc2(self.activation(self.fc1(self.final_layer_norm(seen)))))
            mx.eval(done[-1])
            yield
        return mx.concatenate(done)


class Encoder(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = Convolution(config.mels, config.width, 1)
        self.conv2 = Convolution(config.width, config.width, 2)
        self.embed_positions = nn.Embedding(config.positions, config.width)
        self.layers = [EncoderLayer(config) for _ in range(config.encoder_layers)]
        self.layer_norm = nn.LayerNorm(config.width)
        self.activation = nn.GELU()
        self._rows = part_rows(config)

    def run(self, mels: mx.array) -> Work:
        """What is heard in a window [frames, mels]: [positions, width]."""
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
    """Positions of one layer that take about PART_FLOPS."""
    products = 2 * config.width * (2 * config.width + 2 * config.encoder_inner)
    attention = 4 * config.positions * config.width
    return max(16, min(config.positions, int(PART_FLOPS / (products + attention))))


class DecoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.self_attn = Attention(config.width, config.decoder_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.width)
        self.encoder_attn = Attention(config.width, config.decoder_heads)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.decoder_inner)
        self.fc2 = nn.Linear(config.decoder_inner, config.width)
        self.activation = nn.GELU()

    def read(self, x: mx.array, written: DecoderStates, mask: mx.array | None) -> mx.array:
        """The first third: what was written is seen."""
        normed = self.self_attn_layer_norm(x)
        keys, values = written.extend(*self.self_attn.pair(normed))
        return x + self.self_attn.attend(self.self_attn.queries(normed), keys, values, mask)

    def write(self, x: mx.array) -> mx.array:
        """The last third, after what was heard is seen."""
        return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))


class DecoderStates:
    """Keys and values of what one layer has written, in room for all that it may write."""

    def __init__(self, heads: int, size: int, room: int, dtype: mx.Dtype) -> None:
        self._keys, self._values = (mx.zeros((room, heads, size), dtype) for _ in range(2))
        self.length = 0

    def extend(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        begin, self.length = self.length, self.length + keys.shape[0]
        self._keys[begin : self.length] = keys
        self._values[begin : self.length] = values
        return self._keys[: self.length], self._values[: self.length]


class Decoder(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width)
        self.layers = [DecoderLayer(config) for _ in range(config.decoder_layers)]
        self.layer_norm = nn.LayerNorm(config.width)
        self._heads, self._size, self._room = config.decoder_heads, config.width // config.decoder_heads, config.context

    def hear(self, sound: mx.array) -> Iterator[tuple[mx.array, mx.array]]:
        """Keys and values of what was heard, layer by layer."""
        for layer in self.layers:
            yield layer.encoder_attn.pair(sound)

    def states(self, dtype: mx.Dtype) -> list[DecoderStates]:
        return [DecoderStates(self._heads, self._size, self._room, dtype) for _ in self.layers]

    def hidden(
        self,
        tokens: mx.array,
        written: list[DecoderStates],
        heard: list[tuple[mx.array, mx.array]],
        looks: list[mx.array] | None = None,
    ) -> mx.array:
        """The states of the tokens that follow what is written. `looks` gets each layer's scores of the sound,
        [heads, tokens, positions]."""
        begin, count = written[0].length, tokens.shape[0]
        x = self.embed_tokens(tokens) + self.embed_positions.weight[begin : begin + count]
        mask = causal(begin, count).astype(x.dtype) if count > 1 else None
        for layer, states, sound in zip(self.layers, written, heard, strict=True):
            x = layer.read(x, states, mask)
            queries = layer.encoder_attn.queries(layer.encoder_attn_layer_norm(x))
            if looks is not None:
                looks.append(queries.swapaxes(0, 1) * queries.shape[-1] ** -0.5 @ sound[0].transpose(1, 2, 0))
            x = layer.write(x + layer.encoder_attn.attend(queries, *sound))
        return self.layer_norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.embed_tokens.as_linear(hidden).astype(mx.float32)


def causal(begin: int, count: int) -> mx.array:
    """What keeps each of `count` tokens behind `begin` others from seeing those after it."""
    later = mx.arange(begin + count)[None, :] > (begin + mx.arange(count))[:, None]
    return mx.where(later, -1e4, 0.0)


class WhisperModel(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

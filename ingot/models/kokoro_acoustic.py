"""Kokoro's acoustic model: from phonemes to frames of text, pitch and loudness, in a voice's style.

Holds the config, an ALBERT and a text encoder, the LSTMs between them, and the prosody predictor (duration, pitch and
loudness of each phoneme). Convolutions over time are computed as matrix products, in parts that bound the time between
two yields to the engine. States are [time, channels]; one piece of text is computed at a time, so nothing has a batch
axis.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.models.checkpoint import CheckpointConfig
from ingot.models.pooling_models.loading import read_model_config

KokoroWork: TypeAlias = "Generator[None, None, mx.array]"
"""Computes part by part and returns the result."""
KOKORO_PART_FLOPS = 7e8
"""About what is computed between two yields: some 20 ms of one core."""
KOKORO_RATE = 24_000
"""Samples a second, as every Kokoro model is trained with."""
HARMONICS = 9
"""Of a voice's pitch, itself among them."""
MOST_FRAMES = 1000
"""Of one piece of text: 25 seconds."""
MOST_TAPS = 11
"""Of a convolution of the last stage."""
ARRAYS_ALIVE = 13
"""Arrays as long as the last stage's that exist at once."""
LSTM_STEPS = 32
"""Steps of an LSTM between two yields."""
EPSILON = 1e-5


class KokoroConvolution(nn.Module):
    """Pads with zeros to the length of its input. `weight` is [taps, inputs, outputs]."""

    def __init__(
        self, inputs: int, outputs: int, taps: int, *, stride: int = 1, dilation: int = 1, pad: int | None = None
    ) -> None:
        super().__init__()
        self.weight = mx.zeros((taps, inputs, outputs))
        self.bias = mx.zeros((outputs,))
        self._stride, self._dilation = stride, dilation
        self._pad = dilation * (taps - 1) // 2 if pad is None else pad

    @staticmethod
    def from_checkpoint(weight: mx.array) -> mx.array:
        """From [outputs, inputs, taps]."""
        return weight.transpose(2, 1, 0)

    def run(self, x: mx.array, prepare: Callable[[mx.array], mx.array] | None = None) -> KokoroWork:
        """`prepare` is applied to the input, but not to its padding."""
        taps, inputs, outputs = self.weight.shape
        reach = self._dilation * (taps - 1) + 1
        length = (x.shape[0] + 2 * self._pad - reach) // self._stride + 1
        rows, done = max(16, int(KOKORO_PART_FLOPS / (2 * taps * inputs * outputs))), []
        for begin in range(0, length, rows):
            end = min(begin + rows, length)
            first, last = begin * self._stride - self._pad, (end - 1) * self._stride - self._pad + reach
            window = x[max(0, first) : min(last, x.shape[0])]
            window = window if prepare is None else prepare(window)
            done.append(self._convolve(window, max(0, -first), end - begin))
            mx.eval(done[-1])
            yield
        return mx.concatenate(done)

    def _convolve(self, x: mx.array, front: int, count: int) -> mx.array:
        """`count` rows of output, of `x` after `front` zeros."""
        if self._stride == 1 and native.can_convolve():
            return native.convolve_rows(x, self.weight, self.bias, dilation=self._dilation, front=front, count=count)
        taps, _, outputs = self.weight.shape
        steps = (count - 1) * self._stride + 1
        back = steps + self._dilation * (taps - 1) - front - x.shape[0]
        x = mx.pad(x, [(front, back), (0, 0)])
        shifted = [x[at * self._dilation : at * self._dilation + steps : self._stride] for at in range(taps)]
        return mx.addmm(self.bias, mx.concatenate(shifted, axis=-1), self.weight.reshape(-1, outputs))


class UpsamplingConvolution(nn.Module):
    """A transposed convolution with `rate` times as many outputs in time. `weight` is [taps, inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int, taps: int, rate: int) -> None:
        super().__init__()
        self.weight = mx.zeros((taps, inputs, outputs))
        self.bias = mx.zeros((outputs,))
        self._rate = rate

    @staticmethod
    def from_checkpoint(weight: mx.array) -> mx.array:
        """From [inputs, outputs, taps]."""
        return weight.transpose(2, 0, 1)

    def run(self, x: mx.array) -> KokoroWork:
        taps, inputs, outputs = self.weight.shape
        weight = self.weight.transpose(1, 0, 2).reshape(inputs, taps * outputs)
        rows, done = max(16, int(KOKORO_PART_FLOPS / (2 * taps * inputs * outputs))), []
        for begin in range(0, x.shape[0], rows):
            done.append((x[begin : begin + rows] @ weight).reshape(-1, taps, outputs))
            mx.eval(done[-1])
            yield
        cut = (taps - self._rate) // 2
        longer = overlap_add(mx.concatenate(done), self._rate)[cut : cut + x.shape[0] * self._rate] + self.bias
        mx.eval(longer)
        yield
        return longer


class DoublingConvolution(nn.Module):
    """A depthwise transposed convolution of three taps with twice as many outputs in time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = mx.zeros((3, channels))
        self.bias = mx.zeros((channels,))

    @staticmethod
    def from_checkpoint(weight: mx.array) -> mx.array:
        """From [channels, 1, 3]."""
        return weight[:, 0, :].transpose(1, 0)

    def __call__(self, x: mx.array) -> mx.array:
        following = mx.concatenate([x[1:], mx.zeros_like(x[:1])])
        even, odd = x * self.weight[1], x * self.weight[2] + following * self.weight[0]
        return mx.stack([even, odd], axis=1).reshape(-1, x.shape[1]) + self.bias


def overlap_add(frames: mx.array, hop: int) -> mx.array:
    """The sum of [frames, taps, channels] that begin `hop` after one another; taps are a multiple of that."""
    count, taps, channels = frames.shape
    blocks = frames.reshape(count, taps // hop, hop, channels)
    later = taps // hop - 1
    total = sum(mx.pad(blocks[:, at], [(at, later - at), (0, 0), (0, 0)]) for at in range(later + 1))
    assert isinstance(total, mx.array)
    return total.reshape(-1, channels)


@dataclass(frozen=True, slots=True)
class AlbertConfig:
    """Of the ALBERT that reads phonemes."""

    vocab: int
    width: int
    embedding: int
    layers: int
    heads: int
    inner: int
    positions: int


@dataclass(frozen=True, slots=True)
class VocoderConfig:
    """Each of the tuples has an item for a stage or for a kernel."""

    rates: tuple[int, ...]  # by which stages upsample
    kernels: tuple[int, ...]  # with which they do
    channels: int  # before the first
    block_kernels: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]
    fft: int
    hop: int


@dataclass(frozen=True, slots=True)
class KokoroConfig:
    width: int
    style: int
    layers: int
    kernel: int  # of the text encoder
    longest: int  # frames of a phoneme, before its speed is chosen
    inner: int  # channels of the decoder
    residual: int  # channels of the text that its later blocks take again
    phonemes: dict[str, int]
    bert: AlbertConfig
    vocoder: VocoderConfig
    quantization: dict[str, Any]  # of quantised weights

    @property
    def frame(self) -> int:
        """Samples of a frame, which has two values of pitch and loudness."""
        return 2 * self.vocoder.hop * prod(self.vocoder.rates)

    @property
    def piece_bytes(self) -> int:
        """The most memory that a piece takes while it is computed."""
        channels = self.vocoder.channels // 2 ** len(self.vocoder.rates)
        samples = MOST_FRAMES * self.frame
        # The shifted inputs of one part of a convolution.
        seen = min(KOKORO_PART_FLOPS / 2 / channels, MOST_TAPS * channels * samples / self.vocoder.hop)
        return 4 * (samples * (ARRAYS_ALIVE * channels // self.vocoder.hop + 4 * HARMONICS) + int(seen))

    @classmethod
    def read(cls, folder: Path) -> KokoroConfig:
        """Raises ModelError for a folder that holds another kind of model."""
        config = read_model_config(folder)
        if not all(isinstance(config.get(part), dict) for part in ("istftnet", "plbert", "vocab")):
            raise ModelError(
                f"{folder.name} is no Kokoro model, the supported text-to-speech model: config.json has no istftnet"
            )
        own, bert = CheckpointConfig(config), CheckpointConfig(config["plbert"])
        read = cls(
            width=own.number("hidden_dim"),
            style=own.number("style_dim"),
            layers=own.number("n_layer"),
            kernel=own.number("text_encoder_kernel_size"),
            longest=own.number("max_dur"),
            inner=own.number("decoder_dim", 1024),
            residual=own.number("decoder_text_dim", 64),
            phonemes=_phoneme_tokens(config["vocab"], own.number("n_token"), folder),
            bert=AlbertConfig(
                vocab=own.number("n_token"),
                width=bert.number("hidden_size"),
                embedding=bert.number("embedding_size", 128),
                layers=bert.number("num_hidden_layers"),
                heads=bert.number("num_attention_heads"),
                inner=bert.number("intermediate_size"),
                positions=bert.number("max_position_embeddings"),
            ),
            vocoder=_vocoder_config(config["istftnet"]),
            quantization=own.quantization(),
        )
        vocoder = read.vocoder
        if any(
            kernel % rate or (kernel - rate) % 2 for rate, kernel in zip(vocoder.rates, vocoder.kernels, strict=True)
        ):
            raise ModelError(
                f"{folder.name} upsamples by {vocoder.rates} with kernels of {vocoder.kernels}, which is not supported"
            )
        return read


def _phoneme_tokens(vocab: dict[str, Any], count: int, folder: Path) -> dict[str, int]:
    if not all(type(token) is int and 0 <= token < count and len(character) == 1 for character, token in vocab.items()):
        raise ModelError(f"vocab of {folder.name} does not map each character to a token below n_token")
    return vocab


def _vocoder_config(config: dict[str, Any]) -> VocoderConfig:
    number = CheckpointConfig(config).number
    try:
        rates, kernels, blocks = (
            tuple(int(each) for each in config[name])
            for name in ("upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes")
        )
        dilations = tuple(tuple(int(each) for each in block) for block in config["resblock_dilation_sizes"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"istftnet in the model's config.json cannot be read: {error}") from error
    if len(rates) != len(kernels) or len(blocks) != len(dilations) or not rates or not blocks:
        raise ModelError("istftnet in the model's config.json states lists of unlike lengths")
    channels = number("upsample_initial_channel")
    return VocoderConfig(
        rates, kernels, channels, blocks, dilations, number("gen_istft_n_fft"), number("gen_istft_hop_size")
    )


class AlbertAttention(nn.Module):
    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(config.width, config.width) for _ in range(4))
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)
        self._heads = config.heads

    def __call__(self, x: mx.array) -> mx.array:
        queries, keys, values = (
            project(x).reshape(x.shape[0], self._heads, -1).swapaxes(0, 1)[None]
            for project in (self.query, self.key, self.value)
        )
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5)
        return self.LayerNorm(x + self.dense(attended[0].swapaxes(0, 1).reshape(x.shape)))


class AlbertLayer(nn.Module):
    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = nn.Linear(config.width, config.inner)
        self.ffn_output = nn.Linear(config.inner, config.width)
        self.full_layer_layer_norm = nn.LayerNorm(config.width, eps=1e-12)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.attention(x)
        return self.full_layer_layer_norm(x + self.ffn_output(nn.gelu_approx(self.ffn(x))))


class AlbertEmbeddings(nn.Module):
    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.embedding)
        self.position_embeddings = nn.Embedding(config.positions, config.embedding)
        self.token_type_embeddings = nn.Embedding(2, config.embedding)
        self.LayerNorm = nn.LayerNorm(config.embedding, eps=1e-12)

    def __call__(self, tokens: mx.array) -> mx.array:
        positions = self.position_embeddings.weight[: tokens.shape[0]]
        return self.LayerNorm(self.word_embeddings(tokens) + positions + self.token_type_embeddings.weight[0])


class Albert(nn.Module):
    """All its layers have the same weights."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.embeddings = AlbertEmbeddings(config)
        self.embedding_projection = nn.Linear(config.embedding, config.width)
        self.layer = AlbertLayer(config)
        self._layers = config.layers

    def run(self, tokens: mx.array) -> KokoroWork:
        x = self.embedding_projection(self.embeddings(tokens))
        for _ in range(self._layers):
            x = self.layer(x)
            mx.eval(x)
            yield
        return x


class BidirectionalLstm(nn.Module):
    """Has the parameter names of checkpoints. Half of the outputs are of each direction."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        size = outputs // 2
        for direction in ("", "_reverse"):
            self[f"weight_ih_l0{direction}"] = mx.zeros((4 * size, inputs))
            self[f"weight_hh_l0{direction}"] = mx.zeros((4 * size, size))
            self[f"bias_ih_l0{direction}"] = mx.zeros((4 * size,))
            self[f"bias_hh_l0{direction}"] = mx.zeros((4 * size,))

    def run(self, x: mx.array) -> KokoroWork:
        """[length, inputs] to [length, outputs]."""
        forward, reverse = self._gates(x, ""), self._gates(x[::-1], "_reverse")
        gates = mx.stack([forward, reverse], axis=1)[:, :, None]  # [length, directions, 1, 4 * size]
        recurrent = mx.stack([self["weight_hh_l0"].T, self["weight_hh_l0_reverse"].T])
        mx.eval(gates, recurrent)
        hidden = cell = mx.zeros((2, 1, recurrent.shape[1]))
        done = []
        for step in range(x.shape[0]):
            input_gate, forget_gate, candidate, output_gate = mx.split(gates[step] + hidden @ recurrent, 4, axis=-1)
            cell = mx.sigmoid(forget_gate) * cell + mx.sigmoid(input_gate) * mx.tanh(candidate)
            hidden = mx.sigmoid(output_gate) * mx.tanh(cell)
            done.append(hidden)
            if step % LSTM_STEPS == LSTM_STEPS - 1:
                mx.eval(hidden, cell)
                yield
        both = mx.stack(done)[:, :, 0]
        outputs = mx.concatenate([both[:, 0], both[::-1, 1]], axis=-1)
        mx.eval(outputs)
        yield
        return outputs

    def _gates(self, x: mx.array, direction: str) -> mx.array:
        bias = self[f"bias_ih_l0{direction}"] + self[f"bias_hh_l0{direction}"]
        return mx.addmm(bias, x, self[f"weight_ih_l0{direction}"].T)


class KokoroTextEncoder(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.bert.vocab, config.width)
        self.cnn = [
            [KokoroConvolution(config.width, config.width, config.kernel), nn.LayerNorm(config.width)]
            for _ in range(config.layers)
        ]
        self.lstm = BidirectionalLstm(config.width, config.width)

    def run(self, tokens: mx.array) -> KokoroWork:
        x = self.embedding(tokens)
        for convolution, norm in self.cnn:
            assert isinstance(convolution, KokoroConvolution)
            x = yield from convolution.run(x)
            x = nn.leaky_relu(norm(x), 0.2)
        x = yield from self.lstm.run(x)
        return x


class StyleAffine(nn.Module):
    """Scales and shifts channels by a style."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def affine(self, style: mx.array) -> tuple[mx.array, mx.array]:
        scale, shift = mx.split(self.fc(style), 2, axis=-1)
        return 1 + scale, shift


class StyledLayerNorm(StyleAffine):
    def __call__(self, x: mx.array, style: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, *self.affine(style), EPSILON)


class StyledInstanceNorm(StyleAffine):
    """Norms each channel over time."""

    def scale_and_shift(self, x: mx.array, style: mx.array) -> tuple[mx.array, mx.array]:
        """The factor and the summand that norm `x`, or a part of it."""
        scale, shift = self.affine(style)
        scale = scale * mx.rsqrt(mx.var(x, axis=0) + EPSILON)
        shift = shift - scale * mx.mean(x, axis=0)
        mx.eval(scale, shift)
        return scale, shift


class StyledBlock(nn.Module):
    """Two convolutions with a shortcut; `doubles` gives twice as many frames."""

    def __init__(self, inputs: int, outputs: int, style: int, *, doubles: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = StyledInstanceNorm(style, inputs), StyledInstanceNorm(style, outputs)
        self.conv1, self.conv2 = KokoroConvolution(inputs, outputs, 3), KokoroConvolution(outputs, outputs, 3)
        if inputs != outputs:
            self.conv1x1 = nn.Linear(inputs, outputs, bias=False)
        if doubles:
            self.pool = DoublingConvolution(inputs)

    def run(self, x: mx.array, style: mx.array) -> KokoroWork:
        def activate(norm: tuple[mx.array, mx.array], part: mx.array) -> mx.array:
            return nn.leaky_relu(part * norm[0] + norm[1], 0.2)

        first = self.norm1.scale_and_shift(x, style)
        if "pool" in self:
            found = yield from self.conv1.run(self.pool(activate(first, x)))
            x = mx.repeat(x, 2, axis=0)
        else:
            found = yield from self.conv1.run(x, lambda part: activate(first, part))
        second = self.norm2.scale_and_shift(found, style)
        found = yield from self.conv2.run(found, lambda part: activate(second, part))
        shortcut = self.conv1x1(x) if "conv1x1" in self else x
        x = (found + shortcut) * 0.5**0.5
        mx.eval(x)
        yield
        return x


class DurationEncoder(nn.Module):
    """Each of its LSTMs takes the style again."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.width, config.style
        self.lstms = [
            layer
            for _ in range(config.layers)
            for layer in (BidirectionalLstm(width + style, width), StyledLayerNorm(style, width))
        ]

    def run(self, x: mx.array, style: mx.array) -> KokoroWork:
        """[length, width + style]."""
        x = with_style(x, style)
        for layer in self.lstms:
            if isinstance(layer, BidirectionalLstm):
                x = yield from layer.run(x)
            else:
                x = with_style(layer(x, style), style)
        return x


def with_style(x: mx.array, style: mx.array) -> mx.array:
    return mx.concatenate([x, mx.broadcast_to(style, (x.shape[0], style.shape[0]))], axis=-1)


class ProsodyPredictor(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.width, config.style
        self.text_encoder = DurationEncoder(config)
        self.lstm, self.shared = BidirectionalLstm(width + style, width), BidirectionalLstm(width + style, width)
        self.duration_proj = nn.Linear(config.width, config.longest)
        self.F0, self.N = (
            [
                StyledBlock(width, width, style),
                StyledBlock(width, width // 2, style, doubles=True),
                StyledBlock(width // 2, width // 2, style),
            ]
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = KokoroConvolution(width // 2, 1, 1), KokoroConvolution(width // 2, 1, 1)

    def durations(self, x: mx.array, speed: float) -> KokoroWork:
        """The number of frames of each phoneme, from its states."""
        x = yield from self.lstm.run(x)
        frames = mx.sigmoid(self.duration_proj(x)).sum(axis=-1) / speed
        return mx.maximum(mx.round(frames), 1).astype(mx.int32)

    def curves(self, x: mx.array, style: mx.array) -> Generator[None, None, tuple[mx.array, mx.array]]:
        """Pitch and loudness, two values a frame, from the states of frames."""
        shared = yield from self.shared.run(x)
        pitch = yield from _run_blocks(self.F0, self.F0_proj, shared, style)
        loudness = yield from _run_blocks(self.N, self.N_proj, shared, style)
        return pitch, loudness


def _run_blocks(blocks: list[StyledBlock], last: KokoroConvolution, x: mx.array, style: mx.array) -> KokoroWork:
    for block in blocks:
        x = yield from block.run(x, style)
    x = yield from last.run(x)
    return x

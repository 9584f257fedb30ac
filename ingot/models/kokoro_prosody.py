"""How long each phoneme is spoken, how high and how loud, in a voice's style."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import mlx.nn as nn

from ingot.models.kokoro_acoustic import Lstm
from ingot.models.kokoro_config import KokoroConfig
from ingot.models.kokoro_convolutions import Convolution, Doubling, Work

EPSILON = 1e-5


class Styled(nn.Module):
    """What scales and shifts channels as a style has it."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def of(self, style: mx.array) -> tuple[mx.array, mx.array]:
        scale, shift = mx.split(self.fc(style), 2, axis=-1)
        return 1 + scale, shift


class StyledLayerNorm(Styled):
    def __call__(self, x: mx.array, style: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, *self.of(style), EPSILON)


class StyledInstanceNorm(Styled):
    """Each channel is normed over all the time there is."""

    def fixed(self, x: mx.array, style: mx.array) -> tuple[mx.array, mx.array]:
        """What `x`, or a part of it, is to be multiplied by, and what is added then."""
        scale, shift = self.of(style)
        scale = scale * mx.rsqrt(mx.var(x, axis=0) + EPSILON)
        shift = shift - scale * mx.mean(x, axis=0)
        mx.eval(scale, shift)
        return scale, shift


class StyledBlock(nn.Module):
    """Two convolutions and a way around them; `doubles` makes twice as many frames."""

    def __init__(self, inputs: int, outputs: int, style: int, *, doubles: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = StyledInstanceNorm(style, inputs), StyledInstanceNorm(style, outputs)
        self.conv1, self.conv2 = Convolution(inputs, outputs, 3), Convolution(outputs, outputs, 3)
        if inputs != outputs:
            self.conv1x1 = nn.Linear(inputs, outputs, bias=False)
        if doubles:
            self.pool = Doubling(inputs)

    def run(self, x: mx.array, style: mx.array) -> Work:
        def active(norm: tuple[mx.array, mx.array], part: mx.array) -> mx.array:
            return nn.leaky_relu(part * norm[0] + norm[1], 0.2)

        first = self.norm1.fixed(x, style)
        if "pool" in self:
            found = yield from self.conv1.run(self.pool(active(first, x)))
            x = mx.repeat(x, 2, axis=0)
        else:
            found = yield from self.conv1.run(x, lambda part: active(first, part))
        second = self.norm2.fixed(found, style)
        found = yield from self.conv2.run(found, lambda part: active(second, part))
        around = self.conv1x1(x) if "conv1x1" in self else x
        x = (found + around) * 0.5**0.5
        mx.eval(x)
        yield
        return x


class DurationEncoder(nn.Module):
    """The style is seen by each of its LSTMs again."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.width, config.style
        self.lstms = [
            layer for _ in range(config.layers) for layer in (Lstm(width + style, width), StyledLayerNorm(style, width))
        ]

    def run(self, x: mx.array, style: mx.array) -> Work:
        """[length, width + style]."""
        x = with_style(x, style)
        for layer in self.lstms:
            if isinstance(layer, Lstm):
                x = yield from layer.run(x)
            else:
                x = with_style(layer(x, style), style)
        return x


def with_style(x: mx.array, style: mx.array) -> mx.array:
    return mx.concatenate([x, mx.broadcast_to(style, (x.shape[0], style.shape[0]))], axis=-1)


class DurationProjection(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.linear_layer = nn.Linear(config.width, config.longest)


class Prosody(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.width, config.style
        self.text_encoder = DurationEncoder(config)
        self.lstm, self.shared = Lstm(width + style, width), Lstm(width + style, width)
        self.duration_proj = DurationProjection(config)
        self.F0, self.N = (
            [
                StyledBlock(width, width, style),
                StyledBlock(width, width // 2, style, doubles=True),
                StyledBlock(width // 2, width // 2, style),
            ]
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = Convolution(width // 2, 1, 1), Convolution(width // 2, 1, 1)

    def durations(self, x: mx.array, speed: float) -> Work:
        """Frames of each phoneme, of its states."""
        x = yield from self.lstm.run(x)
        frames = mx.sigmoid(self.duration_proj.linear_layer(x)).sum(axis=-1) / speed
        return mx.maximum(mx.round(frames), 1).astype(mx.int32)

    def curves(self, x: mx.array, style: mx.array) -> Generator[None, None, tuple[mx.array, mx.array]]:
        """Pitch and loudness, twice a frame, of the states of frames."""
        shared = yield from self.shared.run(x)
        pitch = yield from _through(self.F0, self.F0_proj, shared, style)
        loudness = yield from _through(self.N, self.N_proj, shared, style)
        return pitch, loudness


def _through(blocks: list[StyledBlock], last: Convolution, x: mx.array, style: mx.array) -> Work:
    for block in blocks:
        x = yield from block.run(x, style)
    x = yield from last.run(x)
    return x

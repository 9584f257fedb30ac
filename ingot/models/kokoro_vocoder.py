"""Kokoro's vocoder: from frames of text, pitch and loudness to samples. It ends in an inverse Fourier transform."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.kernels.cpu import native
from ingot.models.kokoro_acoustic import (
    HARMONICS,
    KOKORO_RATE,
    KokoroConfig,
    KokoroConvolution,
    KokoroWork,
    StyledBlock,
    StyledInstanceNorm,
    UpsamplingConvolution,
    VocoderConfig,
    overlap_add,
)

VOICED_HZ = 10.0
LOUDNESS, HISS = 0.1, 0.003
"""Of voiced samples, and of the noise in them."""


class SnakeBlock(nn.Module):
    """Pairs of convolutions with residual connections and the snake activation."""

    def __init__(self, channels: int, taps: int, dilations: tuple[int, ...], style: int) -> None:
        super().__init__()
        self.convs1 = [KokoroConvolution(channels, channels, taps, dilation=dilation) for dilation in dilations]
        self.convs2 = [KokoroConvolution(channels, channels, taps) for _ in dilations]
        self.adain1, self.adain2 = ([StyledInstanceNorm(style, channels) for _ in dilations] for _ in range(2))
        self.alpha1, self.alpha2 = ([mx.ones((1, channels, 1)) for _ in dilations] for _ in range(2))

    def run(self, x: mx.array, style: mx.array) -> KokoroWork:
        firsts = zip(self.convs1, self.adain1, self.alpha1, strict=True)
        seconds = zip(self.convs2, self.adain2, self.alpha2, strict=True)
        for first, second in zip(firsts, seconds, strict=True):
            found = x
            for convolution, norm, alpha in (first, second):
                scale, shift = norm.scale_and_shift(found, style)
                yield
                found = yield from convolution.run(found, _snake_activation(scale, shift, alpha.reshape(-1)))
            x = x + found
            mx.eval(x)
            yield
        return x


def _snake_activation(scale: mx.array, shift: mx.array, alpha: mx.array) -> Callable[[mx.array], mx.array]:
    def activate(part: mx.array) -> mx.array:
        if native.can_convolve():
            return native.snake_activation(part, scale, shift, alpha)
        part = part * scale + shift
        return part + mx.square(mx.sin(alpha * part)) / alpha

    return activate


class ShortTimeFourier:
    """Short-time Fourier transforms and their inverse, as products: `fft` samples each, `hop` apart."""

    def __init__(self, fft: int, hop: int) -> None:
        self.fft, self.hop = fft, hop
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft) / fft)
        angle = 2 * np.pi * np.outer(np.arange(fft), np.arange(fft // 2 + 1)) / fft
        # Exactly real where it has to be, so that the sign of a phase is no accident of rounding.
        real, imaginary = np.cos(angle), np.where(np.arange(fft // 2 + 1) % (fft // 2) == 0, 0.0, -np.sin(angle))
        twice = np.where(np.arange(fft // 2 + 1) % (fft // 2) == 0, 1.0, 2.0) / fft
        self._forward = mx.array((window[:, None] * np.hstack([real, imaginary])).astype(np.float32))
        self._inverse = mx.array((window * np.vstack([(twice * real).T, (twice * imaginary).T])).astype(np.float32))
        self._window = mx.array((window * window).astype(np.float32))

    def polar(self, samples: mx.array) -> mx.array:
        """Magnitudes and phases of frames around each hop, [frames, fft + 2]."""
        half = self.fft // 2
        padded = mx.concatenate([samples[half:0:-1], samples, samples[-2 : -half - 2 : -1]])
        count = samples.shape[0] // self.hop + 1
        spread = (count - 1) * self.hop + 1
        frames = mx.stack([padded[at : at + spread : self.hop] for at in range(self.fft)], axis=-1)
        real, imaginary = mx.split(frames @ self._forward, 2, axis=-1)
        return mx.concatenate(
            [mx.sqrt(real * real + imaginary * imaginary), mx.arctan2(imaginary + 0.0, real)], axis=-1
        )

    def samples(self, magnitude: mx.array, phase: mx.array) -> mx.array:
        """The inverse of `polar`."""
        parts = mx.concatenate([magnitude * mx.cos(phase), magnitude * mx.sin(phase)], axis=-1)
        total = overlap_add((parts @ self._inverse)[:, :, None], self.hop)
        weights = overlap_add(
            mx.broadcast_to(self._window[None, :, None], (*magnitude.shape[:1], self.fft, 1)), self.hop
        )
        half, length = self.fft // 2, (magnitude.shape[0] - 1) * self.hop
        return (total[half : half + length] / weights[half : half + length])[:, 0]


class SineMix(nn.Module):
    """A voice's pitch and its harmonics as one signal."""

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def __call__(self, pitch: mx.array, times: int, noise: mx.array) -> mx.array:
        """`pitch` in Hz, each value for `times` samples."""
        hertz = np.array(pitch, dtype=np.float64).reshape(-1, 1)
        cycles = (hertz * np.arange(1, HARMONICS + 1) / KOKORO_RATE % 1.0) * times
        ends = np.cumsum(cycles, axis=0)
        # Phases are interpolated between the middles of pitch values; before the first they do not advance.
        begin = np.concatenate([ends[:1], ends]) % 1.0
        advance = np.concatenate([np.zeros((1, HARMONICS)), cycles[1:], np.zeros((1, HARMONICS))])
        along = (mx.arange(times).astype(mx.float32) + 0.5)[None, :, None] / times
        phase = mx.array(begin.astype(np.float32))[:, None] + along * mx.array(advance.astype(np.float32))[:, None]
        half, count = times // 2, hertz.shape[0] * times
        phase = phase.reshape(-1, HARMONICS)[half : half + count]
        voiced = mx.repeat((pitch.reshape(-1, 1) > VOICED_HZ).astype(mx.float32), times, axis=0)
        hiss = voiced * HISS + (1 - voiced) * LOUDNESS / 3
        sines = LOUDNESS * mx.sin(2 * np.pi * phase) * voiced + hiss * noise
        return mx.tanh(self.l_linear(sines))[:, 0]


class KokoroGenerator(nn.Module):
    """Stages that upsample, each of which takes the pitch signal again."""

    def __init__(self, config: VocoderConfig, style: int) -> None:
        super().__init__()
        self.m_source = SineMix()
        self._fourier = ShortTimeFourier(config.fft, config.hop)
        self._kernels, self._times = len(config.block_kernels), prod(config.rates) * config.hop
        self.ups, self.noise_convs, self.noise_res, self.resblocks = [], [], [], []
        channels = config.channels
        for stage, (rate, taps) in enumerate(zip(config.rates, config.kernels, strict=True)):
            self.ups.append(UpsamplingConvolution(channels, channels // 2, taps, rate))
            channels //= 2
            later = prod(config.rates[stage + 1 :])
            last = stage + 1 == len(config.rates)
            pads = {} if last else {"stride": later, "pad": (later + 1) // 2}
            self.noise_convs.append(KokoroConvolution(config.fft + 2, channels, 1 if last else 2 * later, **pads))
            self.noise_res.append(SnakeBlock(channels, 11 if last else 7, (1, 3, 5), style))
            self.resblocks += [
                SnakeBlock(channels, kernel, dilations, style)
                for kernel, dilations in zip(config.block_kernels, config.block_dilations, strict=True)
            ]
        self.conv_post = KokoroConvolution(channels, config.fft + 2, 7)

    def run(self, x: mx.array, style: mx.array, pitch: mx.array, noise: mx.array) -> KokoroWork:
        source = self.m_source(pitch, self._times, noise)
        mx.eval(source)
        yield
        source = self._fourier.polar(source)
        mx.eval(source)
        yield
        for stage, upsample in enumerate(self.ups):
            excitation = yield from self.noise_convs[stage].run(source)
            excitation = yield from self.noise_res[stage].run(excitation, style)
            x = yield from upsample.run(nn.leaky_relu(x, 0.1))
            if stage == len(self.ups) - 1:
                x = mx.concatenate([x[1:2], x])
            x = x + excitation
            mx.eval(x)
            yield
            total = None
            for block in self.resblocks[stage * self._kernels : (stage + 1) * self._kernels]:
                found = yield from block.run(x, style)
                total = found if total is None else total + found
                mx.eval(total)
                yield
            assert total is not None, "there is a kernel"
            x = total / self._kernels
        x = yield from self.conv_post.run(x, lambda part: nn.leaky_relu(part, 0.01))
        magnitude, phase = mx.split(x, 2, axis=-1)
        return self._fourier.samples(mx.exp(magnitude), mx.sin(phase))


class KokoroDecoder(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        style, inner = config.style, config.inner
        joined = inner + 2 + config.residual
        self.encode = StyledBlock(config.width + 2, inner, style)
        self.decode = [
            *(StyledBlock(joined, inner, style) for _ in range(3)),
            StyledBlock(joined, config.vocoder.channels, style, doubles=True),
        ]
        self.F0_conv, self.N_conv = (KokoroConvolution(1, 1, 3, stride=2) for _ in range(2))
        self.asr_res = [KokoroConvolution(config.width, config.residual, 1)]
        self.generator = KokoroGenerator(config.vocoder, style)

    def run(self, text: mx.array, pitch: mx.array, loudness: mx.array, style: mx.array, noise: mx.array) -> KokoroWork:
        """Samples of the frames of `text`; pitch and loudness have two values a frame."""
        slow_pitch = yield from self.F0_conv.run(pitch)
        slow_loudness = yield from self.N_conv.run(loudness)
        residual = yield from self.asr_res[0].run(text)
        x = yield from self.encode.run(mx.concatenate([text, slow_pitch, slow_loudness], axis=-1), style)
        for block in self.decode:
            x = yield from block.run(mx.concatenate([x, residual, slow_pitch, slow_loudness], axis=-1), style)
        samples = yield from self.generator.run(x, style, pitch, noise)
        return samples

"""Convolutions over time as products, in parts that bound the time between two looks at the clock.

States are [time, channels]; one piece of text is spoken at a time, so nothing has rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels import native

Work: TypeAlias = "Generator[None, None, mx.array]"
"""Done part by part; the end's value is what it comes to."""
PART_FLOPS = 7e8
"""About what is computed between two looks at the clock: some 20 ms of one core."""


class Convolution(nn.Module):
    """As wide as what it is given: it pads with zeros. `weight` is [taps, inputs, outputs]."""

    def __init__(
        self, inputs: int, outputs: int, taps: int, *, stride: int = 1, dilation: int = 1, pad: int | None = None
    ) -> None:
        super().__init__()
        self.weight = mx.zeros((taps, inputs, outputs))
        self.bias = mx.zeros((outputs,))
        self._stride, self._dilation = stride, dilation
        self._pad = dilation * (taps - 1) // 2 if pad is None else pad

    @staticmethod
    def arranged(weight: mx.array) -> mx.array:
        """From [outputs, inputs, taps], as checkpoints have it."""
        return weight.transpose(2, 1, 0)

    def run(self, x: mx.array, prepare: Callable[[mx.array], mx.array] | None = None) -> Work:
        """`prepare` is done to what is convolved, and to nothing of the padding."""
        taps, inputs, outputs = self.weight.shape
        reach = self._dilation * (taps - 1) + 1
        length = (x.shape[0] + 2 * self._pad - reach) // self._stride + 1
        rows, done = max(16, int(PART_FLOPS / (2 * taps * inputs * outputs))), []
        for begin in range(0, length, rows):
            end = min(begin + rows, length)
            first, last = begin * self._stride - self._pad, (end - 1) * self._stride - self._pad + reach
            held = x[max(0, first) : min(last, x.shape[0])]
            held = held if prepare is None else prepare(held)
            done.append(self._filtered(held, max(0, -first), end - begin))
            mx.eval(done[-1])
            yield
        return mx.concatenate(done)

    def _filtered(self, held: mx.array, front: int, count: int) -> mx.array:
        """`count` rows of what is seen in `held`, behind `front` zeros."""
        if self._stride == 1 and native.convolves():
            return native.convolve(held, self.weight, self.bias, dilation=self._dilation, front=front, count=count)
        taps, _, outputs = self.weight.shape
        steps = (count - 1) * self._stride + 1
        behind = steps + self._dilation * (taps - 1) - front - held.shape[0]
        held = mx.pad(held, [(front, behind), (0, 0)])
        seen = [held[at * self._dilation : at * self._dilation + steps : self._stride] for at in range(taps)]
        return mx.addmm(self.bias, mx.concatenate(seen, axis=-1), self.weight.reshape(-1, outputs))


class Lengthening(nn.Module):
    """A transposed convolution that makes `rate` times as many. `weight` is [taps, inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int, taps: int, rate: int) -> None:
        super().__init__()
        self.weight = mx.zeros((taps, inputs, outputs))
        self.bias = mx.zeros((outputs,))
        self._rate = rate

    @staticmethod
    def arranged(weight: mx.array) -> mx.array:
        """From [inputs, outputs, taps], as checkpoints have it."""
        return weight.transpose(2, 0, 1)

    def run(self, x: mx.array) -> Work:
        taps, inputs, outputs = self.weight.shape
        weight = self.weight.transpose(1, 0, 2).reshape(inputs, taps * outputs)
        rows, done = max(16, int(PART_FLOPS / (2 * taps * inputs * outputs))), []
        for begin in range(0, x.shape[0], rows):
            done.append((x[begin : begin + rows] @ weight).reshape(-1, taps, outputs))
            mx.eval(done[-1])
            yield
        cut = (taps - self._rate) // 2
        longer = overlapped(mx.concatenate(done), self._rate)[cut : cut + x.shape[0] * self._rate] + self.bias
        mx.eval(longer)
        yield
        return longer


class Doubling(nn.Module):
    """A transposed convolution over three neighbours that makes twice as many, each channel by itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = mx.zeros((3, channels))
        self.bias = mx.zeros((channels,))

    @staticmethod
    def arranged(weight: mx.array) -> mx.array:
        """From [channels, 1, 3], as checkpoints have it."""
        return weight[:, 0, :].transpose(1, 0)

    def __call__(self, x: mx.array) -> mx.array:
        behind = mx.concatenate([x[1:], mx.zeros_like(x[:1])])
        even, odd = x * self.weight[1], x * self.weight[2] + behind * self.weight[0]
        return mx.stack([even, odd], axis=1).reshape(-1, x.shape[1]) + self.bias


def overlapped(frames: mx.array, hop: int) -> mx.array:
    """The sum of [frames, taps, channels] that begin `hop` after one another; taps are a multiple of that."""
    count, taps, channels = frames.shape
    blocks = frames.reshape(count, taps // hop, hop, channels)
    later = taps // hop - 1
    total = sum(mx.pad(blocks[:, at], [(at, later - at), (0, 0), (0, 0)]) for at in range(later + 1))
    assert isinstance(total, mx.array)
    return total.reshape(-1, channels)

"""How each kernel is compared with plain operations, on the device at hand: what differs must not be used.

A kernel states its cases: what it is launched with, and what should come of that. Here they are compiled and compared,
and what was found is remembered for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import Launched, compile_kernels

BOUNDS: Final = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest number, by which an output may be off. It is rounded once, and computed as in float32."""


class Case(NamedTuple):
    """What a kernel made, and what it should have. `bound` is how far off it may be, of the largest number that is
    wanted: with 0 bits are the same. `wanted` is evaluated last, and sees what kernels wrote in place."""

    said: str  # where it is further off, which is shown in place of {off}
    found: mx.array
    wanted: mx.array
    bound: float = 0.0

    def wrong(self) -> str | None:
        mx.eval(self.found)
        if not self.bound:
            return None if mx.array_equal(self.found, self.wanted).item() else self.said
        off = float(mx.abs(self.found.astype(mx.float32) - self.wanted).max() / mx.abs(self.wanted).max())
        return None if off <= self.bound else self.said.format(off=f"{off:.2g}")  # nor what is not a number


Kernels = TypeVar("Kernels", bound=Launched)
Key = TypeVar("Key")
Way = TypeVar("Way")


def check_cases(device: Device, make: Callable[[], Kernels], cases: Callable[[Kernels], Iterable[Case]]) -> str | None:
    """What is wrong with kernels by the first case that fails; None where they are right. Compiles at once all that the
    cases launch, so that nothing is compiled while somebody waits for an answer."""

    def checked() -> str | None:
        kernels = make()
        compile_kernels(device, lambda run: [*cases(kernels.by(run))])
        return first_wrong(case.wrong() for case in cases(kernels))

    return attempted(checked)


def attempted(check: Callable[[], str | None]) -> str | None:
    """What a check finds, or why a kernel does not run at all."""
    try:
        return check()
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def first_wrong(found: Iterable[str | None]) -> str | None:
    return next((reason for reason in found if reason is not None), None)


class Verdicts(Generic[Key, Way]):
    """The kernels of a device, each kind compared once. What does not compile or differs is not used, and `wrong` says
    why."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key, str] = {}
        self._right: dict[Key, Way] = {}  # and how they are launched

    def _way(self, key: Key, ways: Iterable[Way], check: Callable[[Way], str | None]) -> Way | None:
        """The first way that is right; None where none is."""
        if key not in self._right and key not in self.wrong:
            for way in ways:
                wrong = check(way)
                if wrong is None:
                    self._right[key] = way
                    break
                self.wrong[key] = wrong
        return self._right.get(key)

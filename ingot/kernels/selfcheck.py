"""Kernels are compared with plain operations on the device at hand before they are used. One that differs is not used.

A kernel states its cases: an output and the expected value. Here they are compiled and compared, and the verdict is
remembered for each kind of layer: by a model's kernels why one is wrong, and for as long as the process runs what is
right, so that the next model with such layers is loaded sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import Launched, Launcher, compile_kernels
from ingot.kernels.measured import NOTHING_SLOWER, SlowerParts

BOUNDS: Final = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""By dtype, how far an output may be off, relative to the largest number. It is computed in float32 and rounded
once."""


LEAST_LARGEST: Final = 1e-6
"""What is smaller is zero to a model: weights that are padding, in few bits, do not add up to exactly zero."""


class Case(NamedTuple):
    """A kernel's output and the expected value. `bound` is how far off it may be, relative to the largest expected
    number; with 0, bits must be the same. `expected` is evaluated last, and sees what kernels wrote in place."""

    message: str  # the failure, with {off} for the error
    output: mx.array
    expected: mx.array
    bound: float = 0.0

    def wrong(self) -> str | None:
        mx.eval(self.output)
        if not self.bound:
            return None if mx.array_equal(self.output, self.expected).item() else self.message
        off, largest = (float(mx.abs(x).max()) for x in (self.output.astype(mx.float32) - self.expected, self.expected))
        if off <= self.bound * max(largest, LEAST_LARGEST):  # which NaN is not
            return None
        return self.message.format(off=f"{off / largest if largest else off:.2g}")


Kernels = TypeVar("Kernels", bound=Launched)
Key = TypeVar("Key")
Variant = TypeVar("Variant")


_right: WeakKeyDictionary[Launcher, set[Hashable]] = WeakKeyDictionary()
"""The kinds of kernels that were right, by what launches them."""


def check_cases(
    device: Device, kind: Hashable, make: Callable[[], Kernels], cases: Callable[[Kernels], Iterable[Case]]
) -> str | None:
    """The message of the first case that fails; None where all are right, now or when kernels of that kind were checked
    before. First compiles all kernels that the cases launch, so that nothing is compiled during a request."""

    def checked() -> str | None:
        kernels = make()
        right = _right.setdefault(kernels.launcher, set())
        if kind in right:
            return None
        compile_kernels(device, lambda run: [*cases(kernels.by(run))])
        wrong = first_wrong(case.wrong() for case in cases(kernels))
        if wrong is None:
            right.add(kind)
        return wrong

    return attempted(checked)


def attempted(check: Callable[[], str | None]) -> str | None:
    """The result of a check, or why a kernel does not run at all."""
    try:
        return check()
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def first_wrong(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


class Verdicts(Generic[Key, Variant]):
    """The kernels of a device, each kind compared once. One that does not compile or differs is not used, and `wrong`
    has the reason; nor is one that was measured to be `slower` than MLX's own."""

    def __init__(self, device: Device, slower: SlowerParts = NOTHING_SLOWER) -> None:
        self._device, self._slower_parts = device, slower
        self.wrong: dict[Key, str] = {}
        self._right: dict[Key, Variant] = {}

    def _first_right(
        self, key: Key, variants: Iterable[Variant], check: Callable[[Variant], str | None]
    ) -> Variant | None:
        """The first variant of a kernel that is right; None where none is."""
        if key not in self._right and key not in self.wrong:
            for variant in variants:
                wrong = check(variant)
                if wrong is None:
                    self._right[key] = variant
                    break
                self.wrong[key] = wrong
        return self._right.get(key)

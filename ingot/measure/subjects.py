"""What is measured: something of ours, and MLX's own operations that compute the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ingot.measure.figures import Figure
from ingot.measure.turns import Clock, Work, largest_difference, times_in_turns


@dataclass(frozen=True)
class Pair:
    """The same thing computed twice."""

    ours: Work
    mlx: Work
    bound: float | None = None  # where there is no other check: the largest difference allowed
    drawn: bool = False  # both draw tokens, with other random numbers


class WrongKernel(Exception):
    """What the check of ours found: it is not measured."""


@dataclass(frozen=True)
class Subject:
    """`make` returns why there is nothing to measure, if there is not. It makes all inputs, so that only those of one
    subject are in memory. Raises WrongKernel."""

    name: str
    part: str | None
    make: Callable[[], Pair | str]


def figure_of(subject: Subject, *, seconds: float, clock: Clock = time.perf_counter) -> Figure:
    """One that fails is a figure that says so: nothing keeps the next ones from being measured."""
    try:
        return _measured(subject, seconds, clock)
    except WrongKernel as error:
        return Figure(subject.name, "kernels", subject.part, False, str(error))
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError, IndexError) as error:
        reason = f"fails: {' '.join(str(error).split())[:300] or type(error).__name__}"
        return Figure(subject.name, "kernels", subject.part, note=reason)
    finally:
        mx.clear_cache()


def _measured(subject: Subject, seconds: float, clock: Clock) -> Figure:
    pair = subject.make()
    if isinstance(pair, str):
        return Figure(subject.name, "kernels", subject.part, note=pair)
    off = None if pair.drawn else round(largest_difference(_first(pair.ours), _first(pair.mlx)), 6)
    wrong = None
    if off is not None and pair.bound is not None and not off <= pair.bound:
        wrong = f"differs from MLX's own by {off:.2g} of the largest number"
    times = times_in_turns(pair.ours, pair.mlx, seconds=seconds, clock=clock)
    return Figure(
        *(subject.name, "kernels", subject.part, wrong is None, wrong, off),
        *(round(times.ours * 1e6, 2), round(times.mlx * 1e6, 2), "us", round(times.ratio, 3), times.turns),
    )


def _first(work: Work) -> mx.array:
    made = work()
    return made if isinstance(made, mx.array) else made[0]

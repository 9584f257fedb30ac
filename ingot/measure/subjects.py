"""What is measured: something of ours, and MLX's own operations that compute the same. One after the other, several
times: the ratio of one turn is of the same state of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from ingot.measure.figures import LEAST_TURNS, Figure

Work = Callable[[], mx.array | Sequence[mx.array]]
Clock = Callable[[], float]
ROUNDS = 7
TURN_S = 0.02
"""What one side of a turn takes at least, of work that takes less."""
MOST_REPEATS = 64


class Times(NamedTuple):
    ours: float  # seconds of one
    mlx: float
    ratio: float
    turns: int


def times_in_turns(ours: Work, mlx: Work, *, seconds: float, clock: Clock = time.perf_counter) -> Times:
    """Medians, in about so many seconds. What Python takes to ask for the work is not within the clock: where that
    matters, steps are graphs."""
    began = clock()
    first = [work_seconds(work, 1, clock) for work in (ours, mlx, ours, mlx)][2:]
    repeats = max(1, min(MOST_REPEATS, int(TURN_S / max(*first, 1e-6))))
    turns: list[tuple[float, float]] = []
    while len(turns) < ROUNDS and (len(turns) < LEAST_TURNS or clock() - began < seconds):
        if len(turns) % 2:
            theirs = work_seconds(mlx, repeats, clock)
            turns.append((work_seconds(ours, repeats, clock), theirs))
        else:
            mine = work_seconds(ours, repeats, clock)
            turns.append((mine, work_seconds(mlx, repeats, clock)))
    return times_of(turns)


def times_of(turns: Sequence[tuple[float, float]]) -> Times:
    """The medians of turns (ours, MLX's), and of their ratios."""
    mine, theirs = zip(*turns, strict=True)
    return Times(median(mine), median(theirs), median(ours / max(mlx, 1e-9) for ours, mlx in turns), len(turns))


def work_seconds(work: Work, repeats: int, clock: Clock = time.perf_counter) -> float:
    """What the device takes; what Python takes to ask for it, it does while the device works on an earlier step."""
    asked = [work() for _ in range(repeats)]
    mx.synchronize()
    began = clock()
    mx.eval(asked)
    mx.synchronize()
    return (clock() - began) / repeats


def largest_difference(ours: mx.array, mlx: mx.array) -> float:
    """As a share of the largest number of MLX's."""
    mine, theirs = (each.astype(mx.float32).reshape(-1) for each in (ours, mlx))
    return float(mx.abs(mine - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-30))


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

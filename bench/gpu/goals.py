"""What is measured on a GPU, and the goals for an H200."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Something measured, and the same of mlx-lm or MLX on the same weights in the same run."""

    name: str
    value: float
    unit: str
    beside: float | None = None


@dataclass(frozen=True)
class Goal:
    least: float = float("-inf")
    most: float = float("inf")

    def __str__(self) -> str:
        return f"<= {self.most:g}" if self.most < float("inf") else f">= {self.least:g}"

    def met(self, value: float) -> bool:
        return self.least <= value <= self.most


DIFFERING = "answers that differ"
"""The unit of what must be none."""
GOALS = {
    "8B bf16, 1 stream": Goal(least=200),
    "8B bf16, 8 unequal streams": Goal(least=1200),
    "8B bf16, 32 unequal streams": Goal(least=4000),
    "8B bf16, host time of a step of 32": Goal(most=2),
    "8B 4-bit, 1 stream": Goal(least=350),
    "8B 4-bit, 8 unequal streams": Goal(least=1500),
    "8B 4-bit, prefill": Goal(least=20000),
    "hybrid 9B bf16, 1 stream": Goal(least=150),
    "hybrid 9B bf16, 8 unequal streams": Goal(least=700),
    "hybrid 9B bf16, prefill": Goal(least=15000),
    "gated delta, 2,048 tokens of a layer": Goal(most=1),
    "attention, 8 x 8K, heads of 128": Goal(least=2.5),
    "attention, 8 x 8K, heads of 256": Goal(least=2),
    "attention, 1K to 16K mixed, over alike": Goal(least=0.8),
    "attention, width 4 at 32K, over width 1": Goal(most=1.15),
    "attention, width 8 at 32K, over width 1": Goal(most=1.3),
    "qwen3.5-moe, 87000 tokens, next turn from memory over computing": Goal(least=62),
    "qwen3.5-moe, 87000 tokens, next turn from disk over computing": Goal(least=62),
    "qwen3.5 4-bit, 1 stream with a head that is right in 80%": Goal(least=1.6),
    "first token of 64 beside a prompt of 32K": Goal(most=300),
    "memory of 1 x 32K + 7 x 256, over what they hold": Goal(most=1.25),
}


def goal_of(figure: Figure) -> Goal | None:
    return Goal(most=0) if figure.unit == DIFFERING else GOALS.get(figure.name)


def table(figures: Iterable[Figure]) -> str:
    """A line for each; `ratio` is ours over theirs."""
    head = f"{'':52} {'found':>10} {'':20} {'goal':>8} {'met':4} {'mlx-lm':>10} {'ratio':>6}"
    return "\n".join([head, *map(row, figures)])


def row(figure: Figure) -> str:
    goal = goal_of(figure)
    aim, met = ("", "") if goal is None else (str(goal), "yes" if goal.met(figure.value) else "NO")
    beside = "" if figure.beside is None else f"{figure.beside:10.4g} {figure.value / figure.beside:6.2f}"
    return f"{figure.name:52} {figure.value:10.4g} {figure.unit:20} {aim:>8} {met:4} {beside}".rstrip()

"""What the engine has read and written since it started, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tokens of prompts that began to run and of answers. Of the former, those that the prefix cache was asked about
    and those it had."""

    prompt: int = 0
    generated: int = 0
    asked: int = 0
    matched: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.prompt + other.prompt,
            self.generated + other.generated,
            self.asked + other.asked,
            self.matched + other.matched,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    traffic: Traffic
    occupied: float  # the part of the memory for states that running sequences have reserved

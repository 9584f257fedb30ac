"""Filling in the middle: which tokens of a vocabulary stand for it, and the prompts that its family was trained on.

A family is known by its tokens. Most want the prefix first (PSM), some the suffix (SPM). What clients wrote is encoded
as nothing but text, so the text of such a token in somebody's code stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class InfillFamily:
    """The tokens by name. Those of the last three may be missing from a vocabulary."""

    prefix: str
    suffix: str
    middle: str | None  # None: the answer follows the prefix
    suffix_first: bool = False
    repo: str = ""  # begins a repository's files, with its name
    file: str = ""  # begins each of them, with its path
    separator: str = ""  # stands between files instead, in families that have no token for a repository


BARS: Final = InfillFamily(
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    repo="<|repo_name|>",
    file="<|file_sep|>",
    separator="<|file_separator|>",
)
FAMILIES: Final = (
    BARS,  # Qwen2.5-Coder, Qwen3-Coder; CodeGemma; Granite 3; Phi-4
    InfillFamily("<fim_prefix>", "<fim_suffix>", "<fim_middle>", repo="<repo_name>", file="<file_sep>"),  # StarCoder
    InfillFamily("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillFamily("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillFamily("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    InfillFamily("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
    InfillFamily("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillFamily("<PRE>", "<SUF>", "<MID>"),
    InfillFamily("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillFamily("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Coder
)
# What such an answer ends with, besides the tokens above and the model's end tokens, which may be those of chats.
ENDS: Final = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|EOT|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"),
    *("<reponame>", "<filename>", "<|reponame|>", "<|filename|>"),
)
NAMES: Final = frozenset(
    name
    for family in FAMILIES
    for name in (family.prefix, family.suffix, family.middle, family.repo, family.file, family.separator)
    if name
)
# Names for what a client does not tell: those that llama.cpp's server gives.
REPOSITORY, CURRENT_FILE = "myproject", "filename"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Infill:
    """A vocabulary's tokens for filling in the middle. `ends` are those that end what is filled in."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repo: int | None
    file: int | None
    separator: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, id_of: Callable[[str], int | None]) -> Infill | None:
        """None for a vocabulary that names no such tokens."""
        for family in FAMILIES:
            prefix, suffix = id_of(family.prefix), id_of(family.suffix)
            middle = None if family.middle is None else id_of(family.middle)
            if prefix is None or suffix is None or (middle is None and family.middle is not None):
                continue
            repo, file, separator = (
                id_of(name) if name else None for name in (family.repo, family.file, family.separator)
            )
            ends = (*map(id_of, ENDS), prefix, suffix, middle, repo, file, separator)
            known = frozenset(id for id in ends if id is not None)
            return cls(prefix, suffix, middle, family.suffix_first, repo, file, separator, known)
        return None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """What is to be filled in stands between the two."""
        front, back = [self.prefix, *before], [self.suffix, *after]
        parts = back + front if self.suffix_first else front + back
        return parts if self.middle is None else [*parts, self.middle]

    def context(self, files: Iterable[tuple[str, str]], encode: Encode) -> list[int]:
        """Other files, by name and text, to stand before the prompt."""
        given = list(files)
        if not given:
            return []
        made: list[int] = []
        if self.repo is not None and self.file is not None:
            made += [self.repo, *encode(f"{REPOSITORY}\n")]
            for name, text in given:
                made += [self.file, *encode(f"{name}\n{text}\n")]
            return [*made, self.file, *encode(f"{CURRENT_FILE}\n")]
        if self.separator is not None:
            for name, text in given:
                made += [*encode(f"{name}\n{text}"), self.separator]
            return made
        return list(encode("".join(f"#{name}\n{text}\n" if name else f"{text}\n" for name, text in given)))

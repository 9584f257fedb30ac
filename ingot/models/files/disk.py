"""Telling a full disk from what else can go wrong when something is fetched, whoever noticed it first."""

from __future__ import annotations

import errno
import os
from typing import Final

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
WORDS: Final = tuple(os.strerror(number) for number in FULL)


def says_full(text: str) -> bool:
    return any(words in text for words in WORDS)


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind `error`, which libraries wrap in their own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if (isinstance(error, OSError) and error.errno in FULL) or says_full(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False

"""What a vocabulary leaves behind in the threads that used it."""

from __future__ import annotations

import ctypes
import gc
import platform
from pathlib import Path

import pytest

from ingot.text.tokenizer.tokenizer import Tokenizer

DENSE = Path(__file__).parents[3] / "foundry" / "models" / "dense"
TEXT = " ".join(
    f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in range(9**5, 9**5 + 9000)
)
"""Of many words, none twice."""
LOADS, MOST_EACH = 5, 200_000


class _Heap(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def in_use() -> int:
    """Bytes of the heap that somebody holds."""
    gc.collect()
    look = ctypes.CDLL(None).mallinfo2
    look.restype = _Heap
    heap = look()
    return int(heap.uordblks) + int(heap.hblkhd)


def load_and_use() -> None:
    tokenizer = Tokenizer.load(DENSE)
    assert len(tokenizer.encode(TEXT, add_special=False)) > 9000
    tokenizer.encode(TEXT, add_special=False, quoted=[3])


@pytest.mark.alone
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="looks at glibc's heap")
def test_a_thread_keeps_nothing_of_the_words_that_an_unloaded_vocabulary_encoded() -> None:
    load_and_use()
    before = in_use()
    for _ in range(LOADS):
        load_and_use()
    assert in_use() - before < LOADS * MOST_EACH

"""How much work reading a text takes, as a number that is the same on every machine and however busy it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ingot.text.parser.reader import TextReader

ROOM = "ingot.text."


def work(run: Callable[[], object]) -> int:
    """Calls of functions in `ingot.text` while `run` runs, and the characters of every text that they are given, make
    or return: each text once, however often it is handed on.

    What is done to a text is in proportion to that, so this grows as the time would.
    """
    calls = 0
    texts: dict[int, str] = {}  # by identity, and held so that none gets another's

    def watch(frame: FrameType, event: str, given: Any) -> None:
        nonlocal calls
        if not frame.f_globals.get("__name__", "").startswith(ROOM):
            return
        if event == "call":
            calls += 1
            texts.update((id(value), value) for value in frame.f_locals.values() if type(value) is str)
        elif event == "return" and frame.f_code is TextReader.feed.__code__:
            unread = frame.f_locals["self"].text
            texts[id(unread)] = unread
        elif event == "return" and type(given) is str:
            texts[id(given)] = given

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls + sum(map(len, texts.values()))


def steps(run: Callable[[], object]) -> int:
    """Python's instructions in `ingot.text` while `run` runs: for loops over what is no text."""
    count = 0

    def watch(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_globals.get("__name__", "").startswith(ROOM):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def spent(run: Callable[[], object]) -> float:
    """Processor time of the fastest of a few runs, for what other languages do: good for ratios alone."""

    def once() -> float:
        began = time.process_time()
        run()
        return max(time.process_time() - began, 0.001)

    return min(once() for _ in range(3))

"""What a model has done that does not generate, since it was loaded."""

from __future__ import annotations

from typing import Final

from ingot.observe.histogram import Histogram
from ingot.observe.metrics import REQUEST_S

ENDINGS: Final = ("stop", "abort", "error")
"""How requests end, as vLLM calls it."""


class SideFigures:
    """The event loop writes; any thread may read, without a lock. Counts only grow."""

    def __init__(self) -> None:
        self.endings = dict.fromkeys(ENDINGS, 0)
        self.read_tokens = 0  # of texts that were encoded
        self.written_tokens = 0  # of what was heard
        self.request_s, self.queue_s, self.inference_s = (Histogram(REQUEST_S) for _ in range(3))

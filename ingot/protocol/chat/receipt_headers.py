"""What an answer that is not streamed carries, for clients that only look at headers."""

from __future__ import annotations

from typing import Final

MATCHED_HEADER: Final = "ingot-cache-matched-tokens"
REASON_HEADER: Final = "ingot-cache-reason"
TIMING_HEADERS: Final = ("ingot-queue-s", "ingot-prefill-s", "ingot-decode-s")
RECEIPT_HEADERS: Final = (MATCHED_HEADER, REASON_HEADER, *TIMING_HEADERS)

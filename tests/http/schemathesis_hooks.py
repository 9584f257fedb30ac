"""Loaded by schemathesis: which refusals of schema-valid bodies are right, as no JSON Schema can express the rule."""

from __future__ import annotations

from typing import Any

import schemathesis

SAID = (
    "must be at least n",  # best_of against n
    "cannot be streamed",  # best_of above n
    "one request may have",  # prompts times answers
    "needs the last message to be an assistant's",  # continue_final_message
    "unknown fields",  # over all objects of a body
    "did you mean",
)


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether `failure` counts."""
    if response.status_code != 400 or "rejected" not in failure.title.lower():
        return True
    return not any(words in response.json()["error"]["message"] for words in SAID)

"""What is promised about equal texts is one sentence, on every page that promises it."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PROMISE = (
    "A request with a seed, or without sampling, gives the same tokens whatever else the server computes, "
    "and whatever was cached."
)
EXCEPTIONS = ("GPUs", "AMX", "--deterministic", "without native kernels", "KV")


@pytest.mark.parametrize("page", ["ideas", "protocols", "operations", "architecture"])
def test_the_promise_is_the_same_sentence_with_its_exceptions_beside_it(page: str) -> None:
    text = " ".join((DOCS / f"{page}.md").read_text().split())
    assert text.count(PROMISE) == 1
    beside = text[text.index(PROMISE) :][:2400]
    assert all(exception in beside for exception in EXCEPTIONS)

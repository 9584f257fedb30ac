"""Guessing ahead from a request's field to its receipt and the server's metrics, with the real engine in between."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ingot.engine.speculation.lookup import LookupProposer
from ingot.engine.speculation.proposer import ForcedTokensProposer
from tests import engines
from tests.http.running import running
from tests.http.scripted import settings
from tests.waiting import WAIT_S

TOKENS = 60
BODY = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    engine = engines.start(
        "llama", proposers=(ForcedTokensProposer(), LookupProposer()), fixed_draft_tokens=3
    )  # whether it pays or not
    try:
        with running(engine, settings()) as url, httpx.Client(base_url=url, timeout=60) as made:
            yield made
    finally:
        engine.close()


def complete(client: httpx.Client, **fields: Any) -> Any:
    made = client.post("/v1/completions", json=BODY | fields)
    assert made.status_code == 200, made.text
    return made.json()


def metrics(client: httpx.Client) -> dict[str, int]:
    found = re.findall(r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\d+)$", metrics_text(client), re.M)
    return {name: int(value) for name, value in found}


def metrics_from(client: httpx.Client, proposed: int) -> dict[str, int]:
    """Once so many are counted, or never will be: an answer is told before the engine adds its last step up."""
    until = time.monotonic() + WAIT_S
    while (counted := metrics(client))["draft_tokens"] < proposed and time.monotonic() < until:
        time.sleep(0.01)
    return counted


def metrics_text(client: httpx.Client) -> str:
    made = client.get("/metrics")
    assert made.status_code == 200
    return made.text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_a_text_is_the_same_whoever_draft_tokens(client: httpx.Client, sampling: dict[str, Any]) -> None:
    texts = {complete(client, speculate=who, **sampling)["choices"][0]["text"] for who in ("off", "lookup", "auto")}
    assert len(texts) == 1


def test_receipts_add_up_to_the_metrics(client: httpx.Client) -> None:
    assert "speculation" not in complete(client, speculate="off", temperature=0)["ingot"]
    assert metrics(client) == {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    result = [complete(client, speculate="lookup", temperature=0)["ingot"]["speculation"] for _ in range(3)]
    # The first token comes with the prompt.
    assert all(one["passes"] + one["accepted"] == TOKENS - 1 for one in result)
    proposed = sum(one["proposed"] for one in result)
    counted = metrics_from(client, proposed)
    assert counted["draft_tokens"] == proposed > 0
    assert counted["accepted_tokens"] == sum(one["accepted"] for one in result)
    by_place = re.findall(r"per_pos_total\{.*position=\"\d+\"\} (\d+)$", metrics_text(client), re.M)
    assert sum(map(int, by_place)) == counted["accepted_tokens"]


def test_whoever_is_not_offered_cannot_be_asked_for(client: httpx.Client) -> None:
    made = client.post("/v1/completions", json=BODY | {"speculate": "mtp"})
    assert made.status_code == 400 and "forced, lookup" in made.json()["error"]["message"]

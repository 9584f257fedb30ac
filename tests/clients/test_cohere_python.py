"""Cohere's Python client, both versions of it, against the real server on a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.running import running
from tests.http.scripted import settings
from tests.http.scripted_encoders import EncodingEngine

cohere = pytest.importorskip("cohere")

DOCUMENTS = ["a", "bb", "ccc"]


@pytest.fixture
def url() -> Iterator[str]:
    with running(EncodingEngine(), settings()) as made:
        yield made


def test_the_newer_client_gets_the_best_documents(url: str) -> None:
    made = cohere.ClientV2(api_key="none", base_url=url).rerank(
        model="toy-rerank", query="q", documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096
    )
    assert [result.index for result in made.results] == [2, 1]
    assert made.meta.tokens.input_tokens == 18 and made.meta.api_version.version == "2"


def test_the_older_client_gets_its_documents_back(url: str) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    made = cohere.Client(api_key="none", base_url=url).rerank(
        model="default", query="q", documents=documents, return_documents=True, rank_fields=["text"]
    )
    assert [result.document.text for result in made.results] == ["ccc", "bb", "a"]


def test_refusals_are_the_clients_own_exceptions(url: str) -> None:
    client = cohere.ClientV2(api_key="none", base_url=url)
    with pytest.raises(cohere.NotFoundError, match="toy-rerank"):
        client.rerank(model="rerank-v3.5", query="q", documents=DOCUMENTS)
    with pytest.raises(cohere.BadRequestError, match="64 at most"):
        client.rerank(model="default", query="q", documents=["x" * 100])

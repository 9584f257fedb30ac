"""The official Python client's embeddings against the real server on a socket."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings
from tests.http.scripted_encoders import EncodingEngine
from tests.waiting import WAIT_S


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with (
        running(EncodingEngine(), settings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


def test_texts_are_embedded_in_the_form_that_the_client_asks_for_by_itself(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="toy-embedding", input=["ab", "c"])
    assert [one.embedding[0] for one in made.data] == [4, 3]
    assert [one.index for one in made.data] == [0, 1] and made.model == "toy-embedding"
    assert made.usage.prompt_tokens == made.usage.total_tokens == 7


def test_floats_are_the_same_numbers(client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="default", input="ab", encoding_format="float").data[0].embedding
    assert floats == client.embeddings.create(model="default", input="ab").data[0].embedding


def test_tokens_dimensions_and_a_user_are_taken(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="default", input=[[1, 2], [3]], dimensions=2, user="me")
    assert [len(one.embedding) for one in made.data] == [2, 2]


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy-embedding"):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(openai.BadRequestError, match="64 at most") as refused:
        client.embeddings.create(model="default", input="x" * 100)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    cut = client.embeddings.create(model="default", input="x" * 100, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 64


def test_without_an_embedding_model_the_client_is_told_how_to_get_one() -> None:
    with (
        running(ScriptedEngine(), settings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="--embedding-model"),
    ):
        client.embeddings.create(model="default", input="a")

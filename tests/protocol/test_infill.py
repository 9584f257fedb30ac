"""`POST /infill` as llama.cpp describes it, and `suffix` in the completions of OpenAI and Ollama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from ingot.engine.engine import Engine
from ingot.errors import BadRequest, ContextOverflow, Unsupported
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.infill import InfillBody, read_infill
from ingot.protocol.model_listings import ollama_capabilities
from ingot.protocol.ollama.request import read_ollama_generate
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.served import ServedModel
from ingot.text.tokenizer.special_tokens import Infill
from tests import scripted
from tests.http.running import running
from tests.http.scripted import BOS, CARD, ByteTokenizer, settings
from tests.waiting import WAIT_S

PREFIX, SUFFIX, MIDDLE, PAD = 260, 261, 262, 263
TOKENS = Infill(PREFIX, SUFFIX, MIDDLE, False, None, None, None, frozenset({MIDDLE, PAD}))
FILLED = (BOS, PREFIX, ord("a"), SUFFIX, ord("b"), MIDDLE)


def served(infill: Infill | None = TOKENS) -> ServedModel:
    return ServedModel.of(CARD, ByteTokenizer(infill=infill), settings())  # type: ignore[arg-type]


def query(read: Any, body: dict[str, Any], infill: Infill | None = TOKENS) -> GenerationTask:
    job = read(body, served(infill), "req-1")
    assert isinstance(job, GenerationTask)
    return job


BODIES = {
    read_infill: {"input_prefix": "a", "input_suffix": "b"},
    read_completion: {"prompt": "a", "suffix": "b"},
    read_ollama_generate: {"prompt": "a", "suffix": "b"},
}
each_way = pytest.mark.parametrize("read", BODIES, ids=lambda read: read.__name__)


@each_way
def test_every_way_of_asking_gives_the_same_prompt_and_the_same_ends(read: Any) -> None:
    request = query(read, BODIES[read]).request
    assert request.prompts == (FILLED,)
    assert request.stop.token_ids == {MIDDLE, PAD}
    assert request.reading is None and request.grammar is None


@each_way
def test_a_model_without_such_tokens_says_so(read: Any) -> None:
    with pytest.raises(Unsupported, match="cannot fill in the middle") as raised:
        query(read, BODIES[read], infill=None)
    assert raised.value.param in ("suffix", "input_suffix")


@each_way
def test_what_is_too_long_is_refused_before_it_is_encoded(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode_plain", lambda *_, **__: pytest.fail("it is too long"))
    for name in BODIES[read]:
        with pytest.raises(ContextOverflow) as raised:
            query(read, BODIES[read] | {name: "x" * 5000})
        assert raised.value.param == name


def test_an_empty_suffix_asks_for_what_follows() -> None:
    assert query(read_completion, {"prompt": "a", "suffix": ""}, infill=None).request.prompts == ((BOS, ord("a")),)
    assert query(read_ollama_generate, {"prompt": "a", "suffix": "", "raw": True}, infill=None)
    assert query(read_infill, {"input_prefix": "a"}).request.prompts == ((BOS, PREFIX, ord("a"), SUFFIX, MIDDLE),)


def test_each_prompt_is_filled_in_before_the_same_suffix_also_one_of_tokens() -> None:
    request = query(read_completion, {"prompt": [[97], [98]], "suffix": "c", "n": 2, "logprobs": 1}).request
    assert request.prompts == tuple((BOS, PREFIX, each, SUFFIX, 99, MIDDLE) for each in (97, 98))
    assert (request.n, request.sampling.logprobs) == (2, 1)


def test_who_ignores_ends_ignores_these_too() -> None:
    assert query(read_completion, {"prompt": "a", "suffix": "b", "ignore_eos": True}).request.stop.token_ids == set()


def test_echo_and_a_suffix_contradict_each_other() -> None:
    with pytest.raises(BadRequest) as raised:
        query(read_completion, {"prompt": "a", "suffix": "b", "echo": True})
    assert raised.value.param == "echo"


@pytest.mark.parametrize("field", [{"system": "x"}, {"format": "json"}, {"think": True}])
def test_what_goes_through_the_template_is_refused_beside_a_suffix(field: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="not used with a suffix"):
        query(read_ollama_generate, {"prompt": "a", "suffix": "b"} | field)


def test_what_asks_for_nothing_stands_beside_a_suffix() -> None:
    beside = {"system": "", "format": "", "think": False}
    assert query(read_ollama_generate, {"prompt": "a", "suffix": "b"} | beside).request.prompts == (FILLED,)


def test_the_line_being_written_follows_the_prefix_and_other_files_come_first() -> None:
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "c", "input_extra": [{"filename": "f", "text": "d"}]}
    assert query(read_infill, body).request.prompts == ((BOS, *b"#f\nd\n", PREFIX, *b"ab", SUFFIX, *b"c", MIDDLE),)


def test_ollama_is_told_that_the_model_can() -> None:
    assert "insert" in ollama_capabilities(served())
    assert "insert" not in ollama_capabilities(served(None))


def test_what_llama_cpps_clients_send_is_taken_and_what_has_no_effect_named() -> None:
    sent = {
        "input_prefix": "a",
        "input_suffix": "b",
        "id_slot": 0,
        "n_predict": 0,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_predict_ms": 500,
        "repeat_penalty": 1.1,
        "n_cmpl": 1,
    }
    job = query(read_infill, sent)
    assert (job.request.max_tokens, job.request.sampling.repetition_penalty) == (1, 1.1)
    assert job.head is not None
    assert sorted(job.head.ignored) == ["id_slot", "samplers", "t_max_predict_ms"]
    with pytest.raises(Unsupported, match="/v1/completions"):
        query(read_infill, sent | {"n_cmpl": 2})


def test_every_field_of_llama_cpps_infill_is_known() -> None:
    assert {"input_prefix", "input_suffix", "input_extra", "prompt", "n_predict", "n_probs", "response_fields"} <= set(
        InfillBody.__dataclass_fields__
    )


# A real engine, whose model fills in what the script says.

CODE = "def add(a, b):\n    return "
SCRIPT_PROMPTS: list[str] = []


def script(prompt: str) -> str:
    SCRIPT_PROMPTS.append(prompt)
    return "a + b" if "add" in prompt else "?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = scripted.start(script, fills=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(engine, settings()) as made:
        yield made
    engine.check()


def test_openais_client_has_the_gap_filled_in(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        whole = client.completions.create(
            model="default", prompt=CODE, suffix="\n", n=2, logprobs=1, max_tokens=20, temperature=0
        )
        assert [choice.text for choice in whole.choices] == ["a + b", "a + b"]
        assert whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.tokens == list("a + b")
        chunks = client.completions.create(model="default", prompt=CODE, suffix="\n", stream=True, max_tokens=20)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a + b"
        again = client.completions.create(model="default", prompt=CODE, suffix="\n", max_tokens=20)
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert SCRIPT_PROMPTS[0] == f"<|fim_prefix|>{CODE}<|fim_suffix|>\n<|fim_middle|>"


def test_ollamas_client_has_the_gap_filled_in(url: str) -> None:
    client = ollama.Client(host=url, timeout=WAIT_S)
    assert client.generate("scripted", prompt=CODE, suffix="\n").response == "a + b"
    lines = client.generate("scripted", prompt=CODE, suffix="\n", stream=True)
    assert "".join(line.response for line in lines) == "a + b"
    assert "insert" in (client.show("scripted").capabilities or [])


def test_infill_answers_in_llama_cpps_words(url: str) -> None:
    body = {"input_prefix": "def add(a, b):\n", "prompt": "    return ", "input_suffix": "\n", "n_probs": 2}
    answer = httpx.post(f"{url}/infill", json=body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"], answer["stopping_word"]) == (
        "a + b",
        True,
        "eos",
        "",
    )
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"] == 6
    assert answer["timings"]["prompt_n"] + answer["tokens_cached"] == answer["tokens_evaluated"]
    first, *rest = answer["completion_probabilities"]
    assert (first["token"], first["logprob"], len(first["top_logprobs"]), len(rest)) == ("a", 0.0, 2, 4)
    stopped = httpx.post(f"{url}/infill", json=body | {"stop": [" +"], "n_probs": 0}).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("a", "word", " +")
    cut = httpx.post(f"{url}/infill", json=body | {"n_predict": 3}).json()
    assert (cut["content"], cut["stop_type"]) == ("a +", "limit")


def test_infill_streams_chunks_of_which_the_last_says_so(url: str) -> None:
    body = {"input_prefix": CODE, "input_suffix": "\n", "stream": True}
    text = httpx.post(f"{url}/infill", json=body).text
    assert text.endswith("\n\n") and "[DONE]" not in text
    chunks = [httpx.Response(200, text=line[6:]).json() for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(chunk["content"] for chunk in chunks) == "a + b"
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["stop_type"] == "eos"


def test_only_the_fields_that_were_asked_for_are_told(url: str) -> None:
    body = {"input_prefix": CODE, "input_suffix": "\n"}
    fields = ["content", "timings/predicted_n", "truncated", "nothing/such"]
    answer = httpx.post(f"{url}/infill", json=body | {"response_fields": fields}).json()
    assert answer == {"content": "a + b", "timings/predicted_n": 6, "truncated": False}


def test_a_prompt_without_an_answer_is_computed_for_later(url: str) -> None:
    body = {"input_prefix": "# add something else entirely\n", "input_suffix": "\n"}
    warmed = httpx.post(f"{url}/infill", json=body | {"n_predict": 0}).json()
    assert (warmed["content"], warmed["tokens_predicted"], warmed["stop_type"]) == ("", 0, "limit")
    later = httpx.post(f"{url}/infill", json=body).json()
    assert later["tokens_cached"] == later["tokens_evaluated"] - 1


def test_the_text_of_tokens_in_code_stays_text(url: str) -> None:
    body = {"input_prefix": "add <|fim_suffix|>", "input_suffix": "<|fim_middle|>x<|im_end|>"}
    with_text = httpx.post(f"{url}/infill", json=body).json()
    expected = sum(len(text) for text in body.values()) + 3
    assert (with_text["content"], with_text["tokens_evaluated"]) == ("a + b", expected)

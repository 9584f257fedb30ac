"""The same request through chat, responses, messages and Ollama: the same prompt, and the same answer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests import scripted
from tests.http.differential import PROTOCOLS, Answer, Assistant, Conversation, Result, User
from tests.http.running import running
from tests.http.scripted import settings

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "time", "description": "The time of day.", "parameters": {"type": "object", "properties": {}}}
ASKED = User("What is the weather?")
CALLED = Assistant("I look.", (("call_1", "weather", {"city": "Paris"}),))
SCRIPT = scripted.said(
    ("18 degrees", "It is 18 degrees in Paris."),
    ("weather and", f"Both.\n{scripted.call('weather', city='Rome')}\n{scripted.call('time')}"),
    ("weather", f"<think>\nI look.\n</think>\n\n{scripted.call('weather', city='Päris')}"),
    ("think", "<think>\nHm, well.\n</think>\n\nI thought."),
    ("count", "one two three four five six seven eight"),
    otherwise="Hello, wörld 🙂",
)
CASES = {
    "text": Conversation((User("Hi"),)),
    "history": Conversation((User("Hi"), Assistant("Hello."), User("Once more")), system="Be brief."),
    "thinking": Conversation((User("think"),)),
    "limit": Conversation((User("count"),), most=12),
    "stop": Conversation((User("count"),), stop="four"),
    "call": Conversation((ASKED,), tools=(WEATHER, TIME), system="Be brief."),
    "calls": Conversation((User("weather and time"),), tools=(WEATHER, TIME)),
    "result": Conversation((ASKED, CALLED, Result("call_1", "weather", "18 degrees")), tools=(WEATHER,)),
    "limit within thinking": Conversation((User("think"),), most=14),
}

ENDS: dict[str, dict[str, object]] = {
    "text": {"reason": "stop"},
    "history": {"reason": "stop"},
    "thinking": {"reason": "stop", "thinking": "Hm, well."},
    "limit": {"reason": "length"},
    "stop": {"reason": "stop", "text": "one two three "},
    "call": {"reason": "tool_calls", "calls": (("weather", {"city": "Päris"}),)},
    "calls": {"reason": "tool_calls", "calls": (("weather", {"city": "Rome"}), ("time", {}))},
    "result": {"reason": "stop"},
    "limit within thinking": {"reason": "length"},
}


class Heard:
    """The script, and the prompts it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return SCRIPT(prompt)


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def client(heard: Heard) -> Iterator[httpx.Client]:
    engine = scripted.start(heard)
    try:
        with running(engine, settings()) as url, httpx.Client(base_url=url) as made:
            yield made
    finally:
        engine.close()


@pytest.mark.parametrize("name", CASES)
def test_every_protocol_gives_the_same_answer_whole_and_streamed(client: httpx.Client, heard: Heard, name: str) -> None:
    heard.prompts.clear()
    answers: dict[str, Answer] = {}
    for protocol in PROTOCOLS:
        for stream in (False, True):
            answers[f"{protocol.path} {'streamed' if stream else 'whole'}"] = protocol.ask(
                client, CASES[name], stream=stream
            )
    expected = answers["/v1/chat/completions whole"]
    assert {field: getattr(expected, field) for field in ENDS[name]} == ENDS[name], "it is what it is called"
    for path, answer in answers.items():
        assert answer == expected, path
    # The script is asked once for each prompt it has not heard lately, and for the beginning of one that was computed
    # in chunks, if a chunk ended within an earlier answer.
    longest = max(heard.prompts, key=len, default="")
    assert all(longest.startswith(prompt) for prompt in heard.prompts)

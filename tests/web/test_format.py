"""The form of answers and the probability of their tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from selenium.webdriver import ActionChains

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def choose(screen: Screen, kind: str) -> None:
    script = "const e = document.getElementById('format'); e.value = arguments[0]; e.dispatchEvent(new Event('input'))"
    screen.run(script, kind)


def test_an_answer_follows_a_schema_and_is_shown_as_json(screen: Screen, server: ScriptedServer) -> None:
    server.answer('{"city": ', '"Paris"}')
    screen.click("#settings-toggle")
    choose(screen, "json_schema")
    screen.fill("#schema", json.dumps(SCHEMA))
    screen.send("A city?")
    screen.until(lambda: screen.state() == "done")
    format = {"type": "json_schema", "name": "answer", "strict": True, "schema": SCHEMA}
    assert server.bodies[0]["text"] == {"format": format}
    assert screen.text(".answer figure.code .language") == "json"
    assert screen.text(".answer pre") == '{"city": "Paris"}'
    screen.reload()
    assert screen.find("#format").get_property("value") == "json_schema"


def test_what_is_no_schema_is_not_sent(screen: Screen, server: ScriptedServer) -> None:
    screen.click("#settings-toggle")
    choose(screen, "json_schema")
    screen.fill("#schema", '{"type": ')
    screen.click("#settings .close")
    screen.send("A city?")
    assert screen.find("#schema").is_displayed() and server.bodies == []
    assert screen.find("#schema").get_property("validationMessage") == "This is no JSON schema."
    choose(screen, "json_object")
    screen.send("")
    screen.until(lambda: server.bodies)
    assert server.bodies[0]["text"] == {"format": {"type": "json_object"}}


def test_the_tokens_of_an_answer_show_what_else_could_have_been_there(screen: Screen, server: ScriptedServer) -> None:
    def token(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "top_logprobs": [{"token": "Rome", "logprob": -2.3}]}

    server.answer("Paris", ".", receipt={"timing": {"queue_s": 0, "prefill_s": 0, "decode_s": 0}}).logprobs = [
        token("Paris", -0.105),
        token(".", 0.0),
    ]
    screen.click("#settings-toggle")
    screen.click("#logprobs")
    screen.click("#settings .close")
    screen.ask("A city?")
    assert server.bodies[0]["include"] == ["message.output_text.logprobs"]
    screen.click("[aria-label='About this answer']")
    pieces = screen.all(".tokens .pieces span")
    assert [piece.text for piece in pieces] == ["Paris", "."]
    ActionChains(screen.browser).move_to_element(pieces[0]).perform()
    screen.until(
        lambda: (
            '"Paris" 90.0%   "Rome" 10.0%' in screen.run("return document.querySelector('.tokens .hint').textContent")
        )
    )

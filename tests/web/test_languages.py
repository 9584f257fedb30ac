"""The languages of the page, by the browser's setting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer
from tests.web.sentences import STATIC, sentences

Speak = Callable[[str], None]
TABLE: dict[str, list[str]] = json.loads((STATIC / "translations.json").read_text(encoding="utf-8"))
FOREIGN = """
const names = `#announcer p, code, pre, kbd, .code, .prose, .bubble, .brand, #model, .welcome h2, .title, .choice .name,
  h1, noscript, script, select.model`;
const words = /^(ingot|JSON|TTFT p50|ITL p50|p90|p99 ms|Top [kp]|Min p|A|B|[\\d.,%\\s·]*|[\\d.,]+ [KMG]?B|)$/;
const isSaid = (text) => words.test(text.trim()) || /[\\u4e00-\\u9fff]/.test(text);
const found = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const { data, parentElement } = texts.currentNode;
  if (!parentElement.closest(names) && parentElement.checkVisibility() && !isSaid(data)) found.push(data.trim());
}
for (const name of ['aria-label', 'title', 'placeholder']) {
  for (const node of document.querySelectorAll(`[${name}]`)) {
    const text = node.getAttribute(name);
    if (!node.closest(names) && node.checkVisibility() && !isSaid(text) && !text.startsWith('{')) found.push(text);
  }
}
return found;
"""
"""What is visible and not in Chinese, besides names and what was said."""


def test_every_sentence_of_the_pages_is_there_in_each_language() -> None:
    assert TABLE.keys() == sentences()
    for sentence, others in TABLE.items():
        assert len(others) == 3 and all(others), sentence
        for said in others:
            assert sorted(re.findall(r"\{\w+\}", said)) == sorted(re.findall(r"\{\w+\}", sentence)), said


@pytest.fixture
def speak(screen: Screen) -> Iterator[Callable[[str], None]]:
    agent = screen.browser.execute_script("return navigator.userAgent")

    def prefer(languages: str) -> None:
        override = {"userAgent": agent, "acceptLanguage": languages}
        screen.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", override)

    yield prefer
    prefer("en-US")


@pytest.mark.browser
def test_everything_that_is_shown_is_in_the_browsers_language(
    speak: Speak, screen: Screen, server: ScriptedServer
) -> None:
    speak("zh-CN,en")
    server.models = [
        {"id": "one", "kind": "chat", "state": "loaded", "max_model_len": 8192, "thinking_format": "think"},
        {"id": "two", "kind": "chat", "state": "unloaded", "input_modalities": ["text", "image"]},
    ]
    server.live["engines"] = []
    server.answer("Hello.", receipt={"timing": {"queue_s": 0.0, "prefill_s": 1.0, "decode_s": 2.0}})
    screen.open()
    assert screen.run("return document.documentElement.lang") == "zh"
    assert screen.run(FOREIGN) == []
    screen.ask("Hi")
    screen.click(".answer [aria-label='关于此回答']")
    screen.click("#settings-toggle")
    assert screen.run(FOREIGN) == []
    screen.click("#engine-toggle")
    screen.click("#model-name")
    screen.until(lambda: screen.find(".more-models").is_displayed())
    assert screen.run(FOREIGN) == []
    screen.visit("/live")
    screen.until(lambda: screen.all("#models li"))
    assert screen.run(FOREIGN) == []
    assert screen.complaints() == []


@pytest.mark.browser
@pytest.mark.parametrize(
    ("languages", "said"),
    [("fr-CA", "Écrivez un message"), ("de,es", "Escribe un mensaje"), ("de", "Write a message")],
)
def test_the_first_language_that_the_page_knows_is_chosen(
    speak: Speak, screen: Screen, languages: str, said: str
) -> None:
    speak(languages)
    screen.open()
    assert screen.find("#prompt").get_attribute("placeholder") == said

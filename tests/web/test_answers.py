"""Answers that go on in the server, and versions of messages, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from selenium.webdriver import Keys

from tests.waiting import WAIT_S
from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

STORED = """
const done = arguments[arguments.length - 1];
indexedDB.open('ingot').onsuccess = ({ target: { result: database } }) => {
  const request = database.transaction('conversations').objectStore('conversations').getAll();
  request.onsuccess = () => {
    database.close();
    done(request.result);
  };
};
"""


def stored(screen: Screen) -> list[dict[str, Any]]:
    return list(screen.browser.execute_async_script(STORED))


def until_stored(screen: Screen, text: str) -> None:
    screen.until(lambda: text in json.dumps(stored(screen)))


def test_an_answer_goes_on_while_the_page_is_left_and_is_picked_up(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("Half", " whole", " more", held=True, thoughts=("Hm",), prompt_tokens=40)
    screen.send("Go")
    answer.gate.release(2)
    screen.until(lambda: screen.answers() == ["Half"])
    until_stored(screen, "Half")
    screen.visit("/live")
    answer.gate.release()
    assert not answer.disconnected.is_set()
    screen.visit("/")
    screen.until(lambda: screen.answers() == ["Half whole"])
    assert screen.state() == "streaming" and server.resumed == [2]
    assert screen.find("#send").get_attribute("aria-label") == "Stop"
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert screen.answers() == ["Half whole more"]
    assert "3 tokens" in screen.text(".answer .facts") and "prompt 40 tokens" in screen.text(".answer .facts")
    assert len(server.bodies) == 1


def test_a_lost_connection_is_taken_up_where_it_broke_off(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("So far", " so good", held=True, breaks_off=True)
    server.refused_resumptions = 1
    screen.send("Hello")
    answer.gate.release()
    screen.until(lambda: "Connection lost" in screen.text(".answer .facts"))
    assert screen.answers() == ["So far"]
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert screen.answers() == ["So far so good"] and server.resumed == [1]


def test_an_answer_whose_events_are_gone_is_fetched_as_a_whole(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("All", " of it", held=True)
    screen.send("Go")
    answer.gate.release()
    until_stored(screen, "All")
    screen.visit("/live")
    answer.gate.open()
    assert answer.finished.wait(WAIT_S)
    server.forgets_events = True
    screen.visit("/")
    screen.until(lambda: screen.state() == "done")
    assert screen.answers() == ["All of it"]


def test_the_server_stores_an_answer_only_until_the_page_has_it(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("a", "b", held=True)
    screen.send("Go")
    screen.until(lambda: server.stored)
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    screen.until(lambda: not server.stored)
    until_stored(screen, '"ab"')
    assert "resp_" not in json.dumps(stored(screen))


@pytest.mark.parametrize("how", ["message", "conversation"])
def test_deleting_ends_the_answer_and_deletes_what_the_server_stores(
    screen: Screen, server: ScriptedServer, how: str
) -> None:
    answer = server.answer("a", "b", held=True)
    screen.send("Go")
    answer.gate.release()
    screen.until(lambda: screen.answers() == ["a"])
    if how == "message":
        screen.run("document.querySelector('[aria-label=\"Delete answer\"]').click()")
    else:
        screen.click("#conversations .more")
        screen.click("#conversation-menu [data-action='delete']")
    assert answer.disconnected.wait(WAIT_S)
    screen.until(lambda: not server.stored)
    assert screen.answers() == []


def test_a_server_that_stores_nothing_answers_all_the_same(screen: Screen, server: ScriptedServer) -> None:
    server.stores = False
    answer = server.answer("Half", " whole", held=True)
    screen.send("Go")
    answer.gate.release()
    screen.until(lambda: screen.answers() == ["Half"])
    assert server.bodies[-1]["store"] is False and not server.stored
    until_stored(screen, "Half")
    screen.reload()
    assert answer.disconnected.wait(WAIT_S)
    screen.until(lambda: screen.state() == "stopped")
    assert screen.answers() == ["Half"]


def test_another_tab_shows_an_answer_and_takes_it_up_when_the_first_is_closed(
    screen: Screen, server: ScriptedServer
) -> None:
    answer = server.answer("Half", " whole", " more", held=True)
    screen.open()
    other = screen.browser.current_window_handle
    screen.browser.execute_script("window.open('/')")
    screen.until(lambda: len(screen.browser.window_handles) == 2)
    [first] = {*screen.browser.window_handles} - {other}
    screen.browser.switch_to.window(first)
    try:
        screen.until(lambda: screen.text("#model") == "smollm2-135m\n8,192-token context")
        screen.send("Go")
        answer.gate.release()
        screen.until(lambda: screen.answers() == ["Half"])
        screen.browser.switch_to.window(other)
        screen.until(lambda: screen.all("#conversations .title"))
        screen.click("#conversations .title")
        screen.until(lambda: screen.answers() == ["Half"])
        answer.gate.release()
        screen.until(lambda: screen.answers() == ["Half whole"])
        assert server.resumed == []
        screen.reload()  # which looks for what is under way, and leaves it to the first tab
        screen.until(lambda: screen.answers() == ["Half whole"])
        assert server.resumed == []
    finally:
        screen.browser.switch_to.window(first)
        screen.browser.close()
        screen.browser.switch_to.window(other)
    screen.until(lambda: server.resumed == [2])
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert screen.answers() == ["Half whole more"]


def test_a_page_that_was_opened_before_fetches_no_file_again(screen: Screen) -> None:
    screen.open()
    screen.reload()
    fetched = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/static/'))"
    assert len(screen.run(fetched)) > 40
    assert screen.run(f"{fetched}.filter((e) => e.transferSize > 0).map((e) => e.name)") == []


def test_conversations_of_an_earlier_version_of_the_page_move_with_their_images(screen: Screen) -> None:
    screen.open()
    image = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
    question = {
        "id": "q",
        "role": "user",
        "content": "Old?",
        "media": [{"kind": "image", "name": "dot.gif", "url": image}],
    }
    messages = [question, {"id": "a", "role": "assistant", "content": "Old.", "state": "done"}]
    old = {"id": "x", "title": "Old?", "named": False, "system": "", "created": 1, "updated": 1, "messages": messages}
    screen.run("localStorage.setItem('ingot.chat.x', arguments[0])", json.dumps(old))
    screen.reload()
    screen.click("#conversations .title")
    assert (screen.questions(), screen.answers()) == (["Old?"], ["Old."])
    screen.until(lambda: screen.run("return document.querySelector('.question img').naturalWidth") == 1)
    assert screen.run("return localStorage.getItem('ingot.chat.x')") is None
    screen.reload()
    screen.until(lambda: len(screen.all("#conversations .title")) == 1)


def test_retry_keeps_the_answer_before_it_with_arrows_between(screen: Screen, server: ScriptedServer) -> None:
    server.answer("A first try")
    screen.ask("Question")
    server.answer("A second try")
    screen.tool(1, "Retry").click()
    screen.until(lambda: screen.answers() == ["A second try"] and screen.state() == "done")
    assert server.bodies[0]["input"] == server.bodies[1]["input"]
    assert screen.text(".answer .versions") == "2 of 2"
    screen.tool(1, "Version before").click()
    assert screen.answers() == ["A first try"]
    screen.ask("And then?")
    assert [each["content"] for each in server.bodies[-1]["input"]] == ["Question", "A first try", "And then?"]
    screen.tool(1, "Version after").click()
    assert screen.answers() == ["A second try"]
    screen.tool(1, "Version before").click()
    assert screen.questions() == ["Question", "And then?"]
    screen.reload()
    assert screen.questions() == ["Question", "And then?"]


def test_editing_a_message_keeps_what_it_was_and_what_followed(screen: Screen, server: ScriptedServer) -> None:
    for text in ("One", "Two", "Three"):
        screen.ask(text)
    screen.tool(2, "Edit message").click()
    screen.fill(".editor textarea", "Zwei")
    screen.click(".editor .primary")
    screen.until(lambda: screen.answers() == ["You said: One", "You said: Zwei"])
    assert [each["content"] for each in server.bodies[-1]["input"]] == ["One", "You said: One", "Zwei"]
    screen.until(lambda: screen.state() == "done")
    screen.tool(2, "Version before").click()
    assert screen.questions() == ["One", "Two", "Three"]
    screen.tool(2, "Delete message").click()
    assert screen.questions() == ["One", "Three"]
    screen.click("#notice button")
    assert screen.questions() == ["One", "Two", "Three"]


def test_a_branch_is_a_conversation_of_its_own(screen: Screen, server: ScriptedServer) -> None:
    screen.ask("One")
    screen.ask("Two")
    screen.tool(1, "New conversation from here").click()
    assert screen.questions() == ["One"]
    screen.ask("Other")
    assert [each["content"] for each in server.bodies[-1]["input"]] == ["One", "You said: One", "Other"]
    assert [title.text for title in screen.all("#conversations .title")] == ["One (branch)", "One"]
    screen.all("#conversations .title")[1].click()
    assert screen.questions() == ["One", "Two"]


def test_a_message_that_is_sent_during_an_answer_waits_and_says_so(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("a", held=True)
    screen.send("First")
    screen.until(lambda: server.bodies)
    screen.send("Second")
    screen.send("Third")
    screen.until(lambda: "Sent after this answer\nSecond\nThird" in screen.text("#queue"))
    assert "queues" in screen.text("#prompt-hint") and len(server.bodies) == 1
    screen.all("#queue [aria-label='Take back']")[1].click()
    assert screen.run("return document.getElementById('prompt').value") == "Third"
    answer.gate.open()
    screen.until(lambda: screen.questions() == ["First", "Second"] and screen.state() == "done")
    assert not screen.find("#queue").is_displayed() and len(server.bodies) == 2


def test_what_waits_stays_where_the_answer_is_stopped(screen: Screen, server: ScriptedServer) -> None:
    server.answer("a", held=True)
    screen.send("First")
    screen.until(lambda: server.bodies)
    screen.send("Second")
    screen.until(lambda: screen.find("#queue").is_displayed())
    screen.press(Keys.ESCAPE)
    screen.until(lambda: screen.state() == "stopped")
    screen.reload()
    assert "Waiting to be sent" in screen.text("#queue")
    screen.click("#queue .link")
    screen.until(lambda: screen.answers()[-1:] == ["You said: Second"])


def test_what_waits_is_sent_after_an_answer_that_was_taken_up_again(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("a", held=True)
    screen.send("First")
    screen.until(lambda: server.stored)
    screen.send("Second")
    until_stored(screen, "Second")
    until_stored(screen, "resp_")
    screen.reload()
    answer.gate.open()
    screen.until(lambda: screen.answers() == ["a", "You said: Second"] and screen.state() == "done")


def test_conversations_are_searched_by_all_their_words(screen: Screen) -> None:
    for text in ("Tell me about whales", "Bread without yeast"):
        screen.click("#new-chat")
        screen.ask(text)
    screen.fill("#search", "YOU SAID: BREAD")
    screen.until(lambda: len(screen.all("#conversations .title")) == 1)
    assert "You said: Bread" in screen.text("#conversations .hit")
    screen.fill("#search", "nowhere")
    assert screen.text("#conversations") == "Nothing found"
    screen.press(Keys.ESCAPE)
    assert len(screen.all("#conversations .title")) == 2


def test_a_draft_survives_another_conversation_and_a_reload(screen: Screen) -> None:
    screen.ask("Old")
    screen.write("half a thought")
    screen.click("#new-chat")
    assert screen.run("return document.getElementById('prompt').value") == ""
    screen.write("something new")
    screen.reload()
    screen.click("#conversations .title")
    assert screen.run("return document.getElementById('prompt').value") == "half a thought"
    screen.click("#new-chat")
    assert screen.run("return document.getElementById('prompt').value") == "something new"


def test_the_model_names_a_conversation_unless_a_setting_forbids_it(screen: Screen, server: ScriptedServer) -> None:
    server.title = 'Title: "Whales and their songs."\n\nMore'
    screen.ask("Tell me about whales")
    screen.until(lambda: screen.text("#conversations .title") == "Whales and their songs")
    assert server.titled[0]["store"] is False
    screen.ask("More")
    screen.click("#settings-toggle")
    screen.click("#titles")
    screen.click("#new-chat")
    screen.ask("Bread")
    assert len(server.titled) == 1 and screen.text("#conversations .title") == "Bread"


def test_a_key_whose_requests_are_counted_spends_none_on_titles(screen: Screen, server: ScriptedServer) -> None:
    server.title, server.headers = "A title", {"x-ratelimit-limit-requests": "2"}
    screen.ask("Hello")
    screen.until(lambda: not server.stored)
    assert server.titled == [] and screen.text("#conversations .title") == "Hello"


def test_presets_hold_the_system_prompt_and_sampling_and_new_chats_begin_without(
    screen: Screen, server: ScriptedServer
) -> None:
    screen.click("#settings-toggle")
    screen.fill("#system", "Be brief.")
    screen.fill("#sampling-temperature", "0.2")
    screen.fill("#preset-name", "Terse")
    screen.press(Keys.ENTER)
    screen.click("#new-chat")
    assert screen.run("return document.getElementById('system').value") == ""
    screen.fill("#sampling-temperature", "1.5")
    screen.reload()
    screen.click("#settings-toggle")
    screen.click("#preset option[value='Terse']")
    screen.ask("Hello")
    assert (server.bodies[-1]["instructions"], server.bodies[-1]["temperature"]) == ("Be brief.", 0.2)
    screen.click("#preset-delete")
    assert [option.text for option in screen.all("#preset option")] == ["No presets yet"]


def test_the_page_opens_without_its_server_once_it_was_there(screen: Screen) -> None:
    server = ScriptedServer()
    screen.server = server
    try:
        screen.open()
        screen.ask("Remember me")
        screen.browser.execute_async_script("navigator.serviceWorker.ready.then(() => arguments[0]())")
        screen.reload()  # what the worker has seen, it holds
        screen.until(lambda: screen.questions() == ["Remember me"])
    finally:
        server.close()
    screen.browser.refresh()
    screen.until(lambda: screen.text("#model-name") == "Not connected")
    assert screen.questions() == ["Remember me"]
    screen.send("Are you there?")
    screen.until(lambda: screen.state() == "failed")
    assert "cannot be reached" in screen.all(".answer .problem")[-1].text


def test_the_receipt_of_an_answer_is_told_in_words(screen: Screen, server: ScriptedServer) -> None:
    receipt = {
        "timing": {"queue_s": 0.01, "prefill_s": 0.5, "decode_s": 2},
        "cache": {"matched_tokens": 32, "tier": "ram", "codec": "raw", "reason": "diverged"},
        "speculation": {"proposed": 100, "accepted": 75, "passes": 20, "tokens_per_pass": 2.5},
    }
    difference = {"message": 0, "role": "system", "character": 9, "token": 6, "ours": " tired", "theirs": " patient"}
    receipt["cache"]["diverged"] = difference
    server.answer("a", prompt_tokens=40, receipt=receipt)
    screen.ask("Hello")
    screen.tool(1, "About this answer").click()
    assert screen.text(".receipt").split("\n") == [
        "32 of 40 prompt tokens came from the cache. Message 1 (system) differs from the cached one after 9 "
        "characters: “tired”, not “patient”.",
        "0.01 s in the queue, 0.50 s to read the prompt, 2.00 s to write the answer.",
        "75 of 100 draft tokens were accepted (75%): 2.5 tokens per pass, instead of one.",
    ]
    screen.tool(1, "About this answer").click()
    assert screen.all(".receipt") == []


def test_thinking_is_offered_where_the_model_thinks_and_its_time_is_told(
    screen: Screen, server: ScriptedServer
) -> None:
    assert not screen.find("#thinking").is_displayed()
    server.models[0]["thinking_format"] = "think"
    screen.reload()
    for choice, fields in {
        "off": {"enable_thinking": False},
        "high": {"reasoning": {"effort": "high"}},
        "": {},
    }.items():
        screen.click(f"#thinking option[value='{choice}']")
        screen.ask("Hello")
        assert {
            name: server.bodies[-1][name] for name in ("enable_thinking", "reasoning") if name in server.bodies[-1]
        } == fields
    answer = server.answer("Yes.", thoughts=("Hm", " hm"), held=True)
    screen.send("Is it?")
    answer.gate.release()
    screen.until(lambda: screen.all(".thinking.going"))
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    summary = screen.all(".thinking summary")[-1]
    assert summary.text.startswith("Thought for ") and summary.text.endswith(" s")

"""The chat page in a real browser, against a server whose answers are scripted."""

from __future__ import annotations

import json

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

from tests.waiting import WAIT_S
from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser


def test_an_answer_appears_piece_by_piece_and_ends_with_its_figures(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("One", " two", " three", held=True, prompt_tokens=40, cached_tokens=32)
    screen.send("Count")
    answer.gate.release(2)
    screen.until(lambda: screen.answers() == ["One two"])
    assert screen.state() == "streaming"
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert screen.answers() == ["One two three"]
    facts = screen.text(".answer .facts")
    assert facts.startswith("3 tokens · ")
    assert "tokens/s · first token" in facts
    assert facts.endswith("prompt 40 tokens, 32 from the cache")
    assert screen.text("#context-use") == "43 of 8,192 tokens"


def test_an_answer_that_was_speculation_ahead_says_how_well(screen: Screen, server: ScriptedServer) -> None:
    speculation = {"proposed": 1234, "accepted": 1000, "passes": 800, "tokens_per_pass": 2.25}
    server.answer("One", " two", prompt_tokens=40, receipt={"speculation": speculation})
    screen.send("Count")
    screen.until(lambda: screen.state() == "done")
    assert screen.text(".answer .facts").endswith(
        "prompt 40 tokens · 1,000 of 1,234 draft tokens accepted, 2.3 tokens per pass"
    )


def test_draft_tokens_that_were_asked_for_and_not_made_are_not_mentioned(
    screen: Screen, server: ScriptedServer
) -> None:
    none = {"proposed": 0, "accepted": 0, "passes": 2, "tokens_per_pass": 1.0}
    server.answer("One", " two", prompt_tokens=40, receipt={"speculation": none})
    screen.send("Count")
    screen.until(lambda: screen.state() == "done")
    assert screen.text(".answer .facts").endswith("prompt 40 tokens")


def test_a_request_streams_with_usage_and_carries_the_whole_conversation(
    screen: Screen, server: ScriptedServer
) -> None:
    screen.ask("First")
    screen.ask("Second")
    body = server.bodies[-1]
    assert body["model"] == "smollm2-135m"
    assert body["stream"] is True
    assert body["background"] is True
    assert body["input"] == [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "You said: First"},
        {"role": "user", "content": "Second"},
    ]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_keeps_the_partial_text_and_hangs_up(screen: Screen, server: ScriptedServer, how: str) -> None:
    answer = server.answer("Kept", " never sent", held=True)
    screen.send("Go")
    answer.gate.release()
    screen.until(lambda: screen.answers() == ["Kept"])
    if how == "button":
        screen.click("#send[aria-label='Stop']")
    else:
        screen.press(Keys.ESCAPE)
    screen.until(lambda: screen.state() == "stopped")
    assert answer.disconnected.wait(WAIT_S)
    assert screen.answers() == ["Kept"]
    assert "stopped" in screen.text(".answer .facts")
    assert screen.ask("Next") == "You said: Next"
    assert [message["content"] for message in server.bodies[-1]["input"]] == ["Go", "Kept", "Next"]


def test_stopping_before_the_first_token_leaves_no_empty_turn_in_the_history(
    screen: Screen, server: ScriptedServer
) -> None:
    answer = server.answer("never", held=True)
    screen.send("Go")
    screen.until(lambda: server.bodies)
    screen.press(Keys.ESCAPE)
    assert answer.disconnected.wait(WAIT_S)
    screen.until(lambda: screen.state() == "stopped")
    screen.ask("Again")
    assert [message["role"] for message in server.bodies[-1]["input"]] == ["user", "user"]


def test_giving_up_an_edit_changes_nothing(screen: Screen, server: ScriptedServer) -> None:
    screen.ask("One")
    screen.tool(0, "Edit message").click()
    screen.fill(".editor textarea", "Other")
    screen.press(Keys.ESCAPE)
    assert screen.questions() == ["One"]
    assert len(server.bodies) == 1
    assert screen.focused() == "Edit message"


def test_a_deleted_message_is_gone_until_undone(screen: Screen, server: ScriptedServer) -> None:
    screen.ask("One")
    screen.ask("Two")
    screen.tool(1, "Delete answer").click()
    assert screen.answers() == ["You said: Two"]
    screen.click("#notice button")
    assert screen.answers() == ["You said: One", "You said: Two"]
    screen.tool(0, "Delete message").click()
    screen.reload()
    assert screen.questions() == ["Two"]


def test_system_prompt_and_sampling_are_sent(screen: Screen, server: ScriptedServer) -> None:
    screen.click("#settings-toggle")
    screen.fill("#system", "Be brief.")
    wanted = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "max_output_tokens": 64,
        "seed": 7,
    }
    for name, value in wanted.items():
        screen.fill(f"#sampling-{name}", str(value))
    screen.ask("Hello")
    body = server.bodies[-1]
    assert body["instructions"] == "Be brief."
    assert {name: body[name] for name in wanted} == wanted
    assert "Be brief." in screen.text(".system")


def test_an_empty_sampling_field_is_not_sent_and_reset_restores_the_defaults(
    screen: Screen, server: ScriptedServer
) -> None:
    screen.ask("Defaults")
    known = {"model", "input", "stream", "background", "store"}
    assert {name: value for name, value in server.bodies[-1].items() if name not in known} == {
        "temperature": 0.7,
        "top_p": 0.95,
    }
    screen.click("#settings-toggle")
    screen.fill("#sampling-temperature", "1.5")
    screen.find("#sampling-top_p").send_keys(Keys.END, *[Keys.BACKSPACE] * 4)
    screen.reload()
    screen.ask("Changed")
    assert server.bodies[-1]["temperature"] == 1.5
    assert "top_p" not in server.bodies[-1]
    screen.click("#settings-toggle")
    screen.click("#sampling-reset")
    screen.ask("Reset")
    assert (server.bodies[-1]["temperature"], server.bodies[-1]["top_p"]) == (0.7, 0.95)


def test_what_a_model_s_makers_recommend_is_left_to_the_server_and_shown(
    screen: Screen, server: ScriptedServer
) -> None:
    server.models = [{**server.models[0], "default_sampling_params": {"temperature": 0.6, "top_k": 20}}]
    screen.reload()
    screen.ask("Recommended")
    assert not {"temperature", "top_p", "top_k"} & set(server.bodies[-1])
    shown = "return ['temperature', 'top_k', 'top_p'].map((n) => document.getElementById(`sampling-${n}`).placeholder)"
    assert screen.run(shown) == ["0.6", "20", "default"]


def test_a_sampling_value_out_of_bounds_is_shown_instead_of_sent(screen: Screen, server: ScriptedServer) -> None:
    screen.click("#settings-toggle")
    screen.fill("#sampling-temperature", "9")
    screen.click("#settings .close")
    screen.send("Hello")
    screen.until(lambda: screen.focused() == "sampling-temperature")
    assert server.bodies == []
    assert screen.run("return document.getElementById('prompt').value") == "Hello"


def test_a_conversation_survives_a_reload(screen: Screen, server: ScriptedServer) -> None:
    server.answer("Some **bold** words")
    screen.ask("Remember me")
    screen.reload()
    assert screen.questions() == ["Remember me"]
    assert screen.text(".answer strong") == "bold"
    screen.ask("Still there?")
    assert len(server.bodies[-1]["input"]) == 3


def test_conversations_are_listed_opened_renamed_and_deleted(screen: Screen) -> None:
    def titles() -> list[str]:
        return [button.text for button in screen.all("#conversations .title")]

    screen.ask("Alpha")
    screen.click("#new-chat")
    assert screen.questions() == []
    screen.ask("Beta")
    assert titles() == ["Beta", "Alpha"]
    screen.all("#conversations .title")[1].click()
    assert screen.questions() == ["Alpha"]
    screen.all("#conversations .more")[1].click()
    screen.click("#conversation-menu [data-action='rename']")
    screen.press("Gamma", Keys.ENTER)
    assert titles() == ["Beta", "Gamma"]
    screen.all("#conversations .more")[1].click()
    screen.click("#conversation-menu [data-action='delete']")
    assert titles() == ["Beta"]
    screen.click("#notice button")
    assert titles() == ["Beta", "Gamma"]
    screen.reload()
    assert titles() == ["Beta", "Gamma"]
    assert screen.questions() == ["Alpha"]


def test_a_conversation_can_be_exported(screen: Screen, server: ScriptedServer) -> None:
    screen.accept_downloads()
    server.answer("An *answer*")
    screen.ask("A question")
    screen.click("#conversations .more")
    screen.click("#conversation-menu [data-action='markdown']")
    assert screen.download() == "# A question\n\n**You**\n\nA question\n\n**Assistant**\n\nAn *answer*\n"
    screen.click("#conversations .more")
    screen.click("#conversation-menu [data-action='json']")
    exported = json.loads(screen.download())
    assert [message["content"] for message in exported["messages"]] == ["A question", "An *answer*"]


def test_two_conversations_are_answered_at_once(screen: Screen, server: ScriptedServer) -> None:
    slow = server.answer("slow", " done", held=True)
    screen.send("First")
    slow.gate.release()
    screen.until(lambda: screen.answers() == ["slow"])
    screen.click("#new-chat")
    assert screen.ask("Second") == "You said: Second"
    screen.until(lambda: len(screen.all("#conversations .busy")) == 1)
    slow.gate.open()
    screen.until(lambda: not screen.all("#conversations .busy"))
    screen.all("#conversations .title")[0].click()
    assert screen.answers() == ["slow done"]


def test_a_refusal_is_shown_readably_and_can_be_retried(screen: Screen, server: ScriptedServer) -> None:
    server.refuse(429, "The queue is full.", **{"Retry-After": "4"})
    screen.send("Hello")
    screen.until(lambda: screen.state() == "failed")
    problem = screen.text(".answer .problem")
    assert "The queue is full." in problem
    assert "Retry in 4 s." in problem
    screen.click(".answer .problem button")
    screen.until(lambda: screen.answers() == ["You said: Hello"])
    assert not screen.find(".answer .problem").is_displayed()


def test_an_error_inside_a_stream_keeps_the_text_before_it(screen: Screen, server: ScriptedServer) -> None:
    server.answer("So far", error={"message": "The engine has stopped.", "type": "server_error"})
    screen.send("Hello")
    screen.until(lambda: screen.state() == "failed")
    assert screen.answers() == ["So far"]
    assert "The engine has stopped." in screen.text(".answer .problem")


def test_an_unreachable_server_is_named_as_such(screen: Screen) -> None:
    conditions = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    screen.browser.execute_cdp_cmd("Network.enable", {})
    screen.browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)
    try:
        screen.send("Hello")
        screen.until(lambda: screen.state() == "failed")
        assert "cannot be reached" in screen.text(".answer .problem")
    finally:
        screen.browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions | {"offline": False})


def test_an_answer_cut_off_by_its_limit_says_so(screen: Screen, server: ScriptedServer) -> None:
    server.answer("Once upon", finish="length")
    screen.ask("A story")
    assert "cut off at the token limit" in screen.text(".answer .facts")


def test_the_key_is_asked_for_and_kept_for_the_tab_only(screen: Screen, server: ScriptedServer) -> None:
    screen.open()
    server.api_key = "open sesame"
    screen.send("Hello")
    screen.until(lambda: screen.find("#key-dialog").is_displayed())
    screen.press("wrong", Keys.ENTER)
    screen.until(lambda: screen.find("#key-dialog-refused").is_displayed())
    screen.press("open sesame", Keys.ENTER)
    screen.until(lambda: screen.answers() == ["You said: Hello"])
    assert "open sesame" not in json.dumps(screen.run("return {...localStorage}"))
    assert "open sesame" in screen.run("return Object.values({...sessionStorage})")
    screen.reload()
    assert screen.ask("Again") == "You said: Again"


def test_declining_to_give_a_key_shows_what_the_server_said(screen: Screen, server: ScriptedServer) -> None:
    screen.open()
    server.api_key = "open sesame"
    screen.send("Hello")
    screen.until(lambda: screen.find("#key-dialog").is_displayed())
    screen.click("#key-dialog-cancel")
    screen.until(lambda: screen.state() == "failed")
    assert "needs an API key" in screen.text(".answer .problem")


def test_one_of_several_models_can_be_chosen(screen: Screen, server: ScriptedServer) -> None:
    server.models = [
        {"id": "small", "context_length": 2048},
        {"id": "vectors", "kind": "embedding"},
        {"id": "large", "kind": "chat", "context_length": 32768},
    ]
    screen.reload()
    screen.click("#model-name")
    assert [name.text for name in screen.all("#model-menu .name")] == ["small", "large"]
    screen.click("#model-menu [data-model='large']")
    screen.until(lambda: "32,768" in screen.text("#model"))
    screen.ask("Hello")
    assert server.bodies[-1]["model"] == "large"


def test_a_line_may_be_broken_without_sending(screen: Screen, server: ScriptedServer) -> None:
    screen.press("First line")
    screen.chord(Keys.SHIFT, Keys.ENTER)
    screen.press("second line", Keys.ENTER)
    screen.until(lambda: screen.state() == "done")
    assert server.bodies[-1]["input"][-1]["content"] == "First line\nsecond line"


def test_text_with_nothing_but_space_is_not_sent(screen: Screen, server: ScriptedServer) -> None:
    screen.press("   ", Keys.ENTER)
    assert screen.questions() == []
    assert server.bodies == []


def test_deleting_a_conversation_that_is_being_answered_hangs_up(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("a", "b", held=True)
    screen.send("Go")
    screen.until(lambda: server.bodies)
    screen.find("#conversations").find_element(By.CSS_SELECTOR, ".more").click()
    screen.click("#conversation-menu [data-action='delete']")
    assert answer.disconnected.wait(WAIT_S)
    assert screen.all("#conversations .title") == []

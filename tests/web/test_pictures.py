"""The pictures of docs/page.md: `INGOT_PICTURES=docs` puts them there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.media.pictures import file_of
from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer
from tests.web.test_live import PAST, RUNNING, TREE, engine

pytestmark = [pytest.mark.browser, pytest.mark.slow]
TIMING = {"queue_s": 0.0, "prefill_s": 0.31, "decode_s": 1.9}
CACHE = {"matched_tokens": 940, "tier": "memory", "codec": "raw", "reason": "new_turn", "diverged": None}
SPECULATION = {"passes": 40, "proposed": 61, "accepted": 47, "tokens_per_pass": 2.2}
RECEIPT = {"timing": TIMING, "cache": CACHE, "speculation": SPECULATION, "ignored": []}
FORMULAS = r"""The roots of \(ax^2 + bx + c = 0\) are

\[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]

| discriminant | roots |
|---|---|
| positive | two, \(x_1 \ne x_2\) |
| zero | one |

```python
def roots(a: float, b: float, c: float) -> tuple[complex, complex]:
    root = (b * b - 4 * a * c) ** 0.5  # complex where it is negative
    return (-b + root) / (2 * a), (-b - root) / (2 * a)
```
"""
MODELS: list[dict[str, Any]] = [
    {"id": "qwen3-8b", "state": "loaded", "max_model_len": 40960, "memory_bytes": 6_900_000_000},
    {"id": "qwen3-vl-4b", "state": "unloaded", "max_model_len": 262144, "input_modalities": ["text", "image", "video"]},
    {"id": "gemma-4-e4b", "state": "loading", "progress": 0.4, "max_model_len": 131072},
]
RECOMMENDED = [
    {"id": "qwen3.5-9b", "task": "chat", "download_bytes": 5_600_000_000},
    {"id": "lfm2.5-8b-a1b", "task": "chat", "download_bytes": 4_800_000_000},
    {"id": "qwen3-vl-8b", "task": "vision", "download_bytes": 5_900_000_000},
]
REQUEST = {
    "type": "mcp_approval_request",
    "id": "mcpr_1",
    "server_label": "files",
    "name": "read",
    "arguments": '{"path": "notes/2026.md"}',
}


@pytest.fixture
def picture(screen: Screen, server: ScriptedServer, tmp_path: Path) -> Callable[[str], None]:
    """Saves what is on screen under a name. A picture of few colours would show nothing."""
    server.models = [{"kind": "chat", "tool_format": "qwen", "thinking_format": "think"} | each for each in MODELS]
    server.live |= {"requests": [RUNNING], "past": [PAST], "engines": [engine()]}
    server.tree = TREE
    server.recommended = RECOMMENDED
    server.mcp = [{"server_label": "files", "tools": [{"name": "read"}, {"name": "search"}]}]
    folder = Path(os.environ.get("INGOT_PICTURES", tmp_path))

    def save(name: str) -> None:
        file = folder / f"{name}.png"
        screen.browser.save_screenshot(str(file))
        with Image.open(file) as image:
            small = image.convert("RGB").quantize(128)
        small.save(file, optimize=True)
        assert len(small.getcolors()) > 20

    return save


def ask(screen: Screen, question: str) -> None:
    screen.ask(question)
    screen.run("document.getElementById('notice').hidden = true")


def test_an_answer_with_formulas_a_table_and_code(
    picture: Callable[[str], None], screen: Screen, server: ScriptedServer
) -> None:
    server.answer(FORMULAS, thoughts=("The user asks for the quadratic formula.",), receipt=RECEIPT)
    ask(screen, "What are the roots of a quadratic equation?")
    screen.until(lambda: len(screen.all(".math.drawn")) == 3)
    picture("page-answer")


def test_a_receipt_in_words(picture: Callable[[str], None], screen: Screen, server: ScriptedServer) -> None:
    sea = "The Gulf Stream carries warm water north.\n\nIt slows where fresh water thins the salt."
    server.answer(sea, receipt=RECEIPT, prompt_tokens=1012, cached_tokens=940)
    ask(screen, "Summarise the second chapter.")
    screen.click("[aria-label='About this answer']")
    picture("page")
    screen.resize(390, 780)
    screen.prefer(prefers_color_scheme="dark")
    picture("page-phone")


def test_models_with_their_state_and_those_that_fit(picture: Callable[[str], None], screen: Screen) -> None:
    screen.click("#model-name")
    screen.until(lambda: screen.find(".more-models details").is_displayed())
    screen.click(".more-models summary")
    picture("page-models")


def test_files_of_a_message(
    picture: Callable[[str], None], screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    server.models[0]["input_modalities"] = ["text", "image"]
    (tmp_path / "photo.png").write_bytes(file_of(320, 240))
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.4\n")
    (tmp_path / "main.py").write_text("print('hello')\n")
    names = "\n".join(str(tmp_path / name) for name in ("photo.png", "report.pdf", "main.py"))
    screen.browser  # noqa: B018  (opens the page)
    screen.find("#attach-files").send_keys(names)
    screen.until(lambda: len(screen.all("#attachments li")) == 3)
    picture("page-files")


def test_a_call_that_waits_for_the_users_word(
    picture: Callable[[str], None], screen: Screen, server: ScriptedServer
) -> None:
    server.answer("", items=[REQUEST], receipt=RECEIPT)
    screen.browser  # noqa: B018
    screen.click("#settings-toggle")
    screen.run("document.getElementById('format').scrollIntoView()")
    ask(screen, "What did I write in my notes?")
    screen.until(lambda: screen.all(".asked"))
    picture("page-tools")


def test_json_with_the_probability_of_each_token(
    picture: Callable[[str], None], screen: Screen, server: ScriptedServer
) -> None:
    pieces = ['{"city":', ' "', "Paris", '",', ' "people"', ": ", "2", "1", "0", "0000", "}"]
    odds = [-0.01, 0.0, -0.2, 0.0, -0.05, 0.0, -0.1, -0.9, -1.6, -0.4, 0.0]
    server.answer(*pieces, receipt=RECEIPT).logprobs = [
        {"token": piece, "logprob": odd, "top_logprobs": []} for piece, odd in zip(pieces, odds, strict=True)
    ]
    screen.browser  # noqa: B018
    screen.run(
        "const e = document.getElementById('format'); e.value = 'json_object'; e.dispatchEvent(new Event('input'))"
    )
    ask(screen, "The capital of France, and how many live there?")
    screen.click("[aria-label='About this answer']")
    picture("page-tokens")


def test_the_engine_and_a_measurement(picture: Callable[[str], None], screen: Screen) -> None:
    screen.visit("/live")
    screen.until(lambda: screen.all("#measure-model option"))
    picture("live")
    screen.click("#measure button")
    screen.until(lambda: screen.text("#measure button") == "Measure" and len(screen.all("#measure tbody tr")) != 1)
    screen.until(lambda: len(screen.all("#measure-result tbody tr")) == 3)
    screen.fill("#compare-prompts", "What is a lease?\nName three rivers.")
    screen.click("#compare button")
    screen.until(lambda: len(screen.all("#compare-result tbody tr")) == 3)
    screen.run("document.getElementById('measure-title').scrollIntoView()")
    picture("live-measure")

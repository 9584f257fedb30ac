"""What axe finds on the pages: nothing, in both themes, on a desktop and on a phone."""

from __future__ import annotations

from importlib.resources import files

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer
from tests.web.test_live import PAST, RUNNING, TREE, engine

pytest.importorskip("axe_core_python", reason="axe is not installed: it is in the extra `test`")
pytestmark = pytest.mark.browser
AXE = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
ANSWER = """# A heading

| a | b |
|---|---|
| 1 | 2 |

```python
print('hi')  # so
```

- [x] done

\\[ x^2 \\]
"""
LOOKS = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]


def findings(screen: Screen) -> list[str]:
    if not screen.run("return 'axe' in window"):
        screen.run(AXE)
    script = """const done = arguments[0];
    const told = ({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html}`);
    axe.run().then(({ violations }) => done(violations.flatMap(told)));"""
    return list(screen.browser.execute_async_script(script))


def look(screen: Screen, theme: str, width: int) -> None:
    screen.resize(width, 800)
    screen.prefer(prefers_color_scheme=theme)
    screen.until(lambda: screen.run("return document.documentElement.dataset.theme") == theme)


@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_axe_finds_nothing_on_the_chat_page(screen: Screen, server: ScriptedServer, theme: str, width: int) -> None:
    server.models = [
        {"id": "one", "kind": "chat", "state": "loaded", "max_model_len": 8192, "thinking_format": "think"},
        {"id": "two", "kind": "chat", "state": "loading", "progress": 0.5},
    ]
    server.mcp = [{"server_label": "files", "tools": [{"name": "read"}]}]
    server.live["engines"] = []
    server.answer(ANSWER, thoughts=("So.",), receipt={"timing": {"queue_s": 0.0, "prefill_s": 1.0, "decode_s": 2.0}})
    screen.open()
    look(screen, theme, width)
    assert findings(screen) == []
    screen.ask("Hi")
    screen.click("[aria-label='About this answer']")
    screen.until(lambda: screen.all(".math.drawn"))
    assert findings(screen) == []
    screen.click("#settings-toggle")
    screen.until(lambda: screen.find("#tools-files").is_displayed())
    assert findings(screen) == []
    screen.click("#settings .close")
    screen.click("#model-name")
    screen.until(lambda: screen.find(".more-models").is_displayed())
    assert findings(screen) == []


@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_axe_finds_nothing_on_the_engine_page(screen: Screen, server: ScriptedServer, theme: str, width: int) -> None:
    server.live |= {"requests": [RUNNING], "past": [PAST], "engines": [engine()]}
    server.tree = TREE
    screen.visit("/live")
    look(screen, theme, width)
    screen.until(lambda: screen.all("#measure-model option"))
    screen.fill("#measure-streams", "1")
    screen.run("document.getElementById('measure').requestSubmit()")
    screen.until(lambda: screen.text("#measure button") == "Measure" and screen.all("#measure-result svg"))
    assert findings(screen) == []

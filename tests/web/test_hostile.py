"""A model's words are hostile: nothing they hold may run, load or escape from where they are shown."""

from __future__ import annotations

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

EVIL = "window.__pwned=1"
PAYLOADS = [
    f"<script>{EVIL}</script>",
    f"<img src=x onerror={EVIL}>",
    f"<svg onload={EVIL}><animate onbegin={EVIL} attributeName=x></svg>",
    f"<iframe srcdoc='<script>parent.{EVIL}</script>'></iframe>",
    f"<details open ontoggle={EVIL}>x</details>",
    f"<a href='javascript:{EVIL}'>raw</a>",
    "<style>@import url(https://evil.example/a.css);</style>",
    "<link rel=prefetch href=https://evil.example/b><base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/c'>",
    f"[a](javascript:{EVIL})",
    f"[b](JaVaScRiPt:{EVIL})",
    f"[c]( javascript:{EVIL} )",
    f"[d](<javascript:{EVIL}>)",
    f"[e](java\tscript:{EVIL})",
    f"[f](\x01javascript:{EVIL})",
    f"[g](&#106;avascript:{EVIL})",
    f"[h](data:text/html,<script>opener.{EVIL}</script>)",
    f"[i](vbscript:{EVIL})",
    f'[j](https://ok.example/"onmouseover="{EVIL})',
    f"[k](https://ok.example 'x\" onclick=\"{EVIL}')",
    "[l](file:///etc/passwd)",
    "[m](/v1/models)",
    "[n](blob:https://ok.example/x)",
    f"<javascript:{EVIL}>",
    f"![o](javascript:{EVIL})",
    "![p](https://evil.example/pixel.png)",
    f"![q](data:image/svg+xml,<svg onload={EVIL}>)",
    f"[![r](https://evil.example/badge.png)](javascript:{EVIL})",
    f"[ref]\n\n[ref]: javascript:{EVIL}",
    f'```"><img src=x onerror={EVIL}>\n</code></pre><script>{EVIL}</script>\n```',
    f"```html\n<script>{EVIL}</script>\n```",
    f"| <img src=x onerror={EVIL}> |\n|---|\n| [s](javascript:{EVIL}) |",
    f"# <img src=x onerror={EVIL}>",
    f"- [ ] <input autofocus onfocus={EVIL}>",
    f"> <marquee onstart={EVIL}>",
    f"`<img src=x onerror={EVIL}>`",
    f"**<b onclick={EVIL}>** _<i onfocus={EVIL} tabindex=1>_",
    f"&lt;script&gt;{EVIL}&lt;/script&gt;",
    "<form action=https://evil.example><button>Send</button></form>",
    "https://ok.example/<script>",
]

ALLOWED = {
    *("P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "BR", "STRONG", "EM", "DEL", "CODE", "PRE"),
    *("A", "INPUT", "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON"),
    *("SVG", "USE"),
}

SURVEY = """
const nodes = [...document.querySelectorAll('.prose *')];
for (const node of nodes) {
  for (const type of ['mouseover', 'focus', 'load', 'error', 'toggle']) node.dispatchEvent(new Event(type));
}
return {
  tags: [...new Set(nodes.map((node) => node.tagName.toUpperCase()))],
  handlers: nodes.flatMap((node) => node.getAttributeNames().filter((name) => /^on|^style$|^src|^form/.test(name))),
  links: nodes.filter((node) => node.tagName === 'A').map((node) => [node.protocol, node.rel, node.target]),
  pwned: window.__pwned ?? null,
};
"""


def test_no_script_runs_and_nothing_is_loaded(screen: Screen, server: ScriptedServer) -> None:
    screen.complaints()
    server.answer(*(f"{payload}\n\n" for payload in PAYLOADS))
    screen.ask("Attack")
    seen = screen.run(SURVEY)
    assert seen["pwned"] is None
    assert set(seen["tags"]) <= ALLOWED
    assert seen["handlers"] == []
    assert {tuple(link) for link in seen["links"]} == {("https:", "noopener noreferrer", "_blank")}
    assert [url for url in screen.loaded() if not url.startswith(server.url)] == []
    assert screen.complaints() == []


@pytest.mark.parametrize("half", [0, 1])
def test_no_half_received_payload_runs_either(screen: Screen, server: ScriptedServer, half: int) -> None:
    text = "\n\n".join(PAYLOADS[half::2])
    answer = server.answer(*(text[at : at + 7] for at in range(0, len(text), 7)))
    screen.ask("Attack slowly")
    assert len(answer.pieces) > 50
    seen = screen.run(SURVEY)
    assert seen["pwned"] is None
    assert set(seen["tags"]) <= ALLOWED
    assert seen["handlers"] == []


def test_an_image_is_a_link_and_is_never_fetched(screen: Screen, server: ScriptedServer) -> None:
    screen.complaints()
    server.answer("![A map](https://evil.example/map.png)")
    screen.ask("Picture")
    link = screen.find(".prose a")
    assert link.text == "A map"
    assert link.get_attribute("href") == "https://evil.example/map.png"
    assert screen.all(".prose img") == []
    assert not any("evil.example" in url for url in screen.loaded())
    assert screen.complaints() == []


def test_words_of_the_user_the_model_name_and_errors_are_shown_as_text(screen: Screen, server: ScriptedServer) -> None:
    markup = f"<img src=x onerror={EVIL}>"
    server.models = [{"id": markup}]
    screen.reload()
    server.refuse(400, markup)
    screen.send(markup)
    screen.until(lambda: screen.state() == "failed")
    assert screen.text("#model-name") == markup
    assert screen.questions() == [markup]
    assert markup in screen.text(".answer .problem")
    assert screen.text("#conversations .title") == markup
    assert screen.run("return [window.__pwned ?? null, document.images.length]") == [None, 0]


def test_the_pages_policy_forbids_inline_script_even_if_markup_got_in(screen: Screen) -> None:
    inject = """
        const box = document.createElement('div');
        document.body.append(box);
        box.innerHTML = '<img src="data:," onerror="window.__pwned=1">';
        const script = document.createElement('script');
        script.textContent = 'window.__pwned=2';
        document.body.append(script);
        return new Promise((done) => setTimeout(() => done(window.__pwned ?? null), 100));
    """
    assert screen.run(inject) is None


def test_a_damaged_store_does_not_keep_the_page_from_opening(screen: Screen) -> None:
    screen.ask("Good")
    screen.run(
        """
        localStorage.setItem('ingot.chat.bad', '{"id": "bad", "messages": [{"role": "system"}]}');
        localStorage.setItem('ingot.chat.worse', '<not json>');
        localStorage.setItem('ingot.sampling', '[');
        localStorage.setItem('ingot.theme', 'x" onload="y');
        """
    )
    screen.reload()
    assert screen.questions() == ["Good"]
    assert len(screen.all("#conversations .title")) == 1
    assert screen.ask("Still works") == "You said: Still works"
    assert screen.run("return localStorage.getItem('ingot.chat.worse')") == "<not json>"

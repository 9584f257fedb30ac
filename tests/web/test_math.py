"""Formulas in answers, as KaTeX draws them in a real browser."""

from __future__ import annotations

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

TEXT = r"""Inline \(x_1 * y_2\) and \[a < b\] in a line.

$$
\frac{a}{b}
$$

1. \[
   \sum_i^n i_i
   \]

Prices of $5 and $6, `\(code\)`, \(\) and an open \( end.

$$\unknown{x}$$

\[ never closed"""


def drawn(screen: Screen) -> list[str]:
    """The sources of the formulas that were drawn, as they are in the answer's order."""
    return list(screen.run("return [...document.querySelectorAll('.math.drawn')].map((m) => m.dataset.source)"))


def test_formulas_are_drawn_and_what_is_none_stays_as_it_was_written(screen: Screen, server: ScriptedServer) -> None:
    screen.complaints()
    server.answer(*(TEXT[at : at + 5] for at in range(0, len(TEXT), 5)))
    screen.ask("Show")
    wanted = [r"\(x_1 * y_2\)", r"\[a < b\]", "$$\n\\frac{a}{b}\n$$", "\\[\n\\sum_i^n i_i\n\\]"]
    screen.until(lambda: drawn(screen) == wanted)
    assert screen.run("return document.querySelectorAll('.math.drawn .katex-mathml math').length") == 4
    shown = screen.text(".answer .prose")
    assert "Prices of $5 and $6, \\(code\\), () and an open ( end." in shown
    assert r"$$\unknown{x}$$" in shown and r"\[ never closed" in shown
    assert [url for url in screen.loaded() if not url.startswith(server.url)] == []
    assert screen.complaints() == []


def test_a_selection_is_copied_with_the_source_of_its_formulas(screen: Screen, server: ScriptedServer) -> None:
    server.answer("Euler:\n\n\\[e^{i\\pi} = -1\\]\n\nso \\(\\pi\\) is odd.")
    screen.ask("Show")
    screen.until(lambda: len(drawn(screen)) == 2)
    copied = screen.run(
        """getSelection().selectAllChildren(document.querySelector('.answer .prose'));
        const clipboardData = new DataTransfer();
        document.dispatchEvent(new ClipboardEvent('copy', { clipboardData }));
        return clipboardData.getData('text/plain');"""
    )
    assert copied.split() == ["Euler:", "\\[e^{i\\pi}", "=", "-1\\]", "so", "\\(\\pi\\)", "is", "odd."]


def test_a_formula_can_neither_call_anyone_nor_hold_the_page_up(screen: Screen, server: ScriptedServer) -> None:
    screen.complaints()
    hostile = [
        r"\(\href{javascript:window.__pwned=1}{x}\)",
        r"\(\includegraphics{https://evil.example/x.png}\)",
        r"\(\htmlData{x=1}{y}\)",
        r"\(\def\a{\a\a}\a\)",
        r"\(\rule{1000000em}{1000000em}\)",
        r"\(" + "{" * 3000,
        "$$" * 3000,
    ]
    server.answer("\n\n".join([*hostile, r"\(\text{end}\)"]))
    screen.ask("Attack")
    screen.until(lambda: r"\(\text{end}\)" in drawn(screen))
    assert screen.all(".prose a, .prose img") == []
    assert screen.run("return [window.__pwned ?? null, document.querySelector('.prose').scrollHeight < 9000]") == [
        None,
        True,
    ]
    assert [url for url in screen.loaded() if not url.startswith(server.url)] == []


def test_long_lines_of_code_are_wrapped_on_request(screen: Screen, server: ScriptedServer) -> None:
    server.answer("```text\n" + "word " * 200 + "\n```")
    screen.ask("Code")
    is_wide = "const pre = document.querySelector('.answer pre'); return pre.scrollWidth > pre.clientWidth"
    assert screen.run(is_wide)
    screen.click(".answer [aria-label='Wrap lines']")
    assert not screen.run(is_wide)
    assert screen.find(".answer [aria-label='Wrap lines']").get_attribute("aria-pressed") == "true"


def test_a_table_is_copied_for_a_spreadsheet(screen: Screen, server: ScriptedServer) -> None:
    server.answer("| name | formula |\n|---|---|\n| **Euler** | \\(e^{i\\pi}\\) |\n")
    screen.ask("Table")
    screen.until(lambda: len(drawn(screen)) == 1)
    screen.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    screen.run("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
    screen.run("document.querySelector('[aria-label=\"Copy table\"]').click()")
    assert screen.run("return window.copied") == "name\tformula\nEuler\t\\(e^{i\\pi}\\)"

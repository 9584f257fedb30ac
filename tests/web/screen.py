"""The chat page as a user meets it: what a test does and reads, without the page's structure in every line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.waiting import WAIT_S
from tests.web.scripted_server import ScriptedServer

T = TypeVar("T")


class Screen:
    """A page that is opened when it is first looked at, so that a test can first write what its server says."""

    def __init__(self, browser: Chrome, server: ScriptedServer, downloads: Path) -> None:
        self._browser = browser
        self._opened = False
        self.server = server
        self.downloads = downloads

    @property
    def browser(self) -> Chrome:
        if not self._opened:
            self.open()
        return self._browser

    def open(self) -> None:
        """The chat page, connected, nothing stored."""
        self.visit("/")
        self.until(lambda: self.text("#model") != "Connecting…")

    def visit(self, path: str) -> None:
        self._opened = True
        self._browser.get(f"{self.server.url}{path}?fresh={self.downloads.name}")

    def reload(self) -> None:
        if self._opened:
            self._browser.refresh()
        else:
            self.visit("/")
        self.until(lambda: self.text("#model") != "Connecting…")

    def hurry(self) -> None:
        """From here on the page's timers run out in a twentieth of their time."""
        self.run("const later = setTimeout; window.setTimeout = (call, ms) => later(call, ms / 20)")

    def until(self, condition: Callable[[], T], why: str = "") -> T:
        """Waits for `condition` to become true; an element that is gone or not there yet counts as false."""
        gone = (NoSuchElementException, StaleElementReferenceException)
        waiting = WebDriverWait(self.browser, WAIT_S, poll_frequency=0.03, ignored_exceptions=gone)
        return waiting.until(lambda _: condition(), why)

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    def chord(self, held: str, key: str) -> None:
        ActionChains(self.browser).key_down(held).send_keys(key).key_up(held).perform()

    def write(self, text: str) -> None:
        """Text for what has the focus, all at once: keys are pressed one by one, which takes the browser far longer."""
        self.browser.execute_cdp_cmd("Input.insertText", {"text": text})

    def send(self, text: str) -> None:
        self.run("document.getElementById('prompt').focus()")
        self.write(text)
        self.find("#prompt").send_keys(Keys.ENTER)

    def ask(self, text: str) -> str:
        """Sends `text` and waits for the whole answer."""
        before = len(self.all(".answer"))
        self.send(text)
        self.until(lambda: len(self.all(".answer")) == before + 1 and self.state() == "done")
        return self.answers()[-1]

    def answers(self) -> list[str]:
        return [prose.text for prose in self.all(".answer .prose")]

    def questions(self) -> list[str]:
        return [bubble.text for bubble in self.all(".question .bubble")]

    def state(self) -> str | None:
        """What became of the last answer: streaming, done, stopped or failed."""
        return self.run("return document.querySelector('.answer:last-of-type')?.dataset.state ?? null")

    def tool(self, message: int, label: str) -> WebElement:
        """The button `label` of the message at this place, counted over questions and answers."""
        return self.all(".message")[message].find_element(By.CSS_SELECTOR, f"[aria-label='{label}']")

    def fill(self, selector: str, text: str) -> None:
        self.run("const field = document.querySelector(arguments[0]); field.focus(); field.select()", selector)
        self.write(text)

    def focused(self) -> str:
        """The id of the focused element, or its label where it has none."""
        script = "const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.textContent"
        return str(self.run(script))

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.until(lambda: self.run("return innerWidth") == width)

    def prefer(self, **features: str) -> None:
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def loaded(self) -> list[str]:
        """The addresses of everything the page has loaded. What its policy forbids is among the complaints instead."""
        return list(self.run("return performance.getEntriesByType('resource').map(({ name }) => name)"))

    def complaints(self) -> list[str]:
        """Policy violations and uncaught errors on the console since this was last called, by whichever test."""
        entries = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        return [entry for entry in entries if "Failed to load resource" not in entry]

    def download(self) -> str:
        """The text of the one file that the page has offered since `accept_downloads`."""

        def finished() -> list[Path]:
            return [path for path in self.downloads.iterdir() if path.suffix in {".json", ".md"}]

        [file] = self.until(finished)
        text = file.read_text()
        file.unlink()
        return text

    def accept_downloads(self) -> None:
        where = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)

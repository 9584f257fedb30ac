"""One server and one browser for all tests of the page; each test gets empty storage and an empty script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",
)

# A page opened under a new name finds nothing that an earlier test stored; reloading it keeps what it stored itself.
FORGET = """
const fresh = new URLSearchParams(location.search).get('fresh');
if (fresh && sessionStorage.getItem('fresh') !== fresh) {
  localStorage.clear();
  sessionStorage.clear();
  indexedDB.deleteDatabase('ingot');
  sessionStorage.setItem('fresh', fresh);
}
"""


def installed() -> tuple[str, str]:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    missing = "chromium" if not browser else "chromedriver"
    reason = f"{missing} is not installed (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, driver = installed()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FORGET})
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    scripted_server.reset()
    return scripted_server


@pytest.fixture
def screen(browser: webdriver.Chrome, server: ScriptedServer, tmp_path: Path) -> Screen:
    """The chat page as who comes for the first time sees it."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get_log("browser")  # complaints of tests before it
    return Screen(browser, server, tmp_path)

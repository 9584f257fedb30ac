"""The page on a real server of two lazy models, which were trained to test features."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from selenium import webdriver

from ingot.config import Settings, model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.http.app import build_fleet_app
from ingot.http.server import make_app_server, open_listener
from tests.media.pictures import file_of
from tests.waiting import WAIT_S
from tests.web.screen import Screen

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MODELS = Path(__file__).parents[2] / "foundry/models"
SHORT = "localStorage.setItem('ingot.sampling', JSON.stringify({ max_output_tokens: 24, temperature: 0 }))"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses") / "responses.db"


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    pytest.importorskip("mlx_vlm")
    tables = {"words": {"path": str(MODELS / "dense")}, "eyes": {"path": str(MODELS / "vision")}}
    settings = Settings(models=tables, lazy=True, port=0, memory="2GiB", cache_dir=None, responses_store=str(store))
    entries = model_entries(settings)
    loader, ready = ModelLoader(settings, entries), threading.Event()
    app = build_fleet_app(Fleet(entries, loader, loader.memory), loader.health, settings)
    server = make_app_server(app, settings, lambda url: ready.set(), open_listener(settings))
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield server.listener.url
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        loader.close()


@pytest.fixture
def screen(browser: webdriver.Chrome, url: str, tmp_path: Path) -> Screen:
    made = Screen(browser, SimpleNamespace(url=url), tmp_path)  # type: ignore[arg-type]
    made.open()
    made.run(SHORT)
    made.reload()
    return made


def test_an_answer_of_a_real_engine_survives_a_reload_and_leaves_nothing_behind(screen: Screen, store: Path) -> None:
    screen.send("Write about the sea.")
    screen.until(lambda: len(screen.all("#messages .answer")) == 1 and screen.text("#conversations .title"))
    screen.until(lambda: screen.state() == "done" or screen.answers()[0])
    screen.reload()
    screen.until(lambda: screen.state() == "done")
    assert screen.answers()[0]
    facts = screen.text(".answer .facts")
    assert "tokens/s" in facts and "first token" in facts and "prompt" in facts
    screen.until(lambda: responses_named(screen) == {None})
    with sqlite3.connect(store) as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone() == (0,)


def responses_named(screen: Screen) -> set[str | None]:
    """The responses of the server that the page still knows of."""
    found = screen.browser.execute_async_script(
        """const done = arguments[0];
        indexedDB.open('ingot').onsuccess = ({ target: { result: database } }) => {
          const all = database.transaction('conversations').objectStore('conversations').getAll();
          all.onsuccess = () => {
            database.close();
            done(all.result.flatMap(({ messages }) => messages.map(({ response }) => response?.id ?? null)));
          };
        };"""
    )
    return set(found)


def test_a_lazy_model_takes_an_image_before_it_was_ever_loaded(screen: Screen, url: str, tmp_path: Path) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{url}/v1/models").json()["data"]}
    assert cards["eyes"]["state"] == "unloaded" and "image" in cards["eyes"]["input_modalities"]
    screen.click("#model-name")
    screen.click("#model-menu [data-model='eyes']")
    assert "Takes images" in screen.text(".welcome")
    (tmp_path / "red.png").write_bytes(file_of(320, 240))
    screen.find("#attach-files").send_keys(str(tmp_path / "red.png"))
    screen.until(lambda: screen.all("#attachments img"))
    screen.ask("Which colour?")
    assert screen.answers()[0]
    screen.click("#model-name")
    screen.until(lambda: "loaded" in screen.text("#model-menu [data-model='eyes'] .hint"))
    assert screen.complaints() == []

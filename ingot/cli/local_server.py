"""A model served inside this process, on a free loopback port, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from ingot.cli.serve import open_door, start_engine
from ingot.config import Settings


@contextlib.contextmanager
def local_server(settings: Settings) -> Iterator[str]:
    """Yields the server's URL. The door stands in a thread of its own and ends with the process."""
    engine = start_engine(settings)
    private = replace(settings, host="127.0.0.1", port=0)
    ready: Future[str] = Future()

    def listen() -> None:
        try:
            open_door(engine, private, ready.set_result)
        except BaseException as error:  # whatever it is, the thread that waits has to hear of it
            if not ready.done():
                ready.set_exception(error)
            raise

    threading.Thread(target=listen, name="ingot-door", daemon=True).start()
    try:
        yield ready.result()
    finally:
        engine.close()

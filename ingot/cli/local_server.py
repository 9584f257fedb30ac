"""A model served inside this process, on a free loopback port, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ingot.cli.serve import leave_at_once, start_engine
from ingot.config import Settings

if TYPE_CHECKING:
    from ingot.http.server import Server


@contextlib.contextmanager
def local_server(settings: Settings, *, encoders: bool = False) -> Iterator[str]:
    """Yields the server's URL. Interrupts are the caller's: the server runs in a thread that never sees them. Models
    that make vectors and scores are left out, unless it is for `encoders`."""
    from ingot.http.server import listen, make_server

    private = replace(
        settings,
        host="127.0.0.1",
        port=0,
        api_key_file=None,
        warm_prompts=None,
        embedding_model=settings.embedding_model if encoders else None,
        rerank_model=settings.rerank_model if encoders else None,
    )
    ready: Future[str] = Future()
    try:
        engine = start_engine(private)
    except KeyboardInterrupt:
        leave_at_once()
    try:
        with _opened(make_server(engine, private, ready.set_result, listen(private)), ready) as url:
            yield url
    finally:
        engine.close()


@contextlib.contextmanager
def _opened(server: Server, ready: Future[str]) -> Iterator[str]:
    def serve() -> None:
        try:
            server.run()
        except BaseException as error:  # whatever it is, the thread that waits has to hear of it
            if ready.done():
                raise
            ready.set_exception(error)

    door = threading.Thread(target=serve, name="ingot-door", daemon=True)
    door.start()
    try:
        yield ready.result()
    finally:
        server.should_exit = True
        door.join()

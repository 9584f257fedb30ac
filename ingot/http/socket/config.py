"""How a server of ours listens: bounded, without what uvicorn would add of its own."""

from __future__ import annotations

from typing import Any

import uvicorn

from ingot.config import Settings
from ingot.http.connections import Connections, affordable
from ingot.http.http11 import BoundedHttp


def server_config(app: Any, settings: Settings, *, keep_alive_s: int, last_words_s: int) -> uvicorn.Config:
    """`keep_alive_s` is how long a connection may be idle, `last_words_s` what answers have when the server stops."""
    return uvicorn.Config(
        app,
        http=BoundedHttp.with_limits(settings.max_header_bytes, Connections(affordable(settings.max_connections))),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # How many are taken before the loop turns to anything else; where there is no file for one, how often that is
        # said at once. What the kernel may keep waiting is set by `listen`.
        backlog=1,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=last_words_s,
    )

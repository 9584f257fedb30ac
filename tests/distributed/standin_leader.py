"""The first rank of a stand-in: the real server before an engine whose tokens are steps of all ranks."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

from ingot.cli.group import inherited_listener, report_to_parent
from ingot.distributed.heartbeat import HeartbeatSender
from ingot.distributed.place import RankConfig
from ingot.distributed.wire import LinkLost, broadcast_frame
from ingot.engine.request import Ended, Request, SequenceEnded, TextDelta, Timing, Usage
from ingot.engine.status import Health
from tests.distributed.steps import END, STEP, STEP_S, STEPS
from tests.http.running import make_server
from tests.http.scripted import ScriptedEngine, ScriptedStream, settings


class CountingEngine(ScriptedEngine):
    def __init__(self, here: RankConfig) -> None:
        super().__init__(None)
        self.last_step, self.ranks_trouble = 0, ""
        self._links = here.links(60.0)
        self._beat = time.monotonic()
        self._stepping = threading.Lock()

    async def open(self, request: Request) -> ScriptedStream:
        stream = await super().open(request)
        threading.Thread(target=self._count, args=(stream,), daemon=True).start()
        return stream

    def health(self) -> Health:
        busy = self._stepping.locked()
        return replace(super().health(), stepped_ago_s=time.monotonic() - self._beat if busy else 0.0)

    def close(self) -> None:
        broadcast_frame(self._links, END)

    def _count(self, stream: ScriptedStream) -> None:
        for number in range(STEPS):
            with self._stepping:
                self._step_together()
            time.sleep(STEP_S)
            stream.put([TextDelta(0, f"{number} ", ())])
        stream.put([SequenceEnded(0, "stop", None, STEPS, 0.0)], [Ended(Usage(1, STEPS), Timing(0.1, 0.2, 0.3))])

    def _step_together(self) -> None:
        self._beat = time.monotonic()
        self.last_step += 1
        try:
            broadcast_frame(self._links, STEP, step=self.last_step)
            for link in self._links:
                link.receive()
        except LinkLost:
            threading.Event().wait()


def lead(here: RankConfig, signs: HeartbeatSender) -> None:
    options = settings()
    engine: Any = CountingEngine(here)
    server = make_server(engine, options, lambda url: signs.did(0), inherited_listener(options))
    report_to_parent(signs, engine, server)
    server.run()
    if server.fatal_error is None:
        engine.close()
    os._exit(0)

"""Computing `--warm-prompts` while nobody else wants anything."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.engine.request import Failed, Request
from ingot.errors import IngotError
from ingot.protocol.chat.warm_prompts import warm_request
from ingot.protocol.served import Served
from ingot.text.input_files import read_prompts

if TYPE_CHECKING:
    from ingot.engine.engine import Engine

log = logging.getLogger("ingot.warm")


def warm_requests(file: Path, served: Iterable[Served]) -> list[Request]:
    """One for each prompt and tenant; `served` is what each of those is. Raises ConfigError that names what is wrong,
    and where."""
    prompts = read_prompts(file)
    return [warm_request(prompt, one, f"warm-{secrets.token_hex(12)}") for one in served for prompt in prompts]


async def warm(engine: Engine, requests: Sequence[Request]) -> None:
    """Compute them one after another; what goes wrong with one is logged and keeps nobody waiting."""
    name, tokens = engine.card.name, sum(len(request.prompts[0]) for request in requests)
    log.info("%s: warming %d prompts of %d tokens in all, while nothing else runs", name, len(requests), tokens)
    for request in requests:
        try:
            await _run(engine, request)
        except IngotError as error:
            log.warning("%s: a prompt of %d tokens was not warmed: %s", name, len(request.prompts[0]), error.message)
    tenants = {request.tenant for request in requests}
    kept = [await asyncio.to_thread(engine.kept.status, tenant) for tenant in tenants]
    pinned = sum(salt.pinned_tokens for status in kept for salt in status.salts)
    log.info("%s is warm: %d tokens are pinned", name, pinned)


async def _run(engine: Engine, request: Request) -> None:
    stream = await engine.open(request)
    try:
        async for events in stream:
            if isinstance(events[-1], Failed):
                raise events[-1].error
    finally:
        stream.close()

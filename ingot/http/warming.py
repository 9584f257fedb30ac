"""Computing `--warm-prompts` while nobody else wants anything."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from ingot.config import Settings
from ingot.engine.request import Failed, Request
from ingot.errors import IngotError
from ingot.http.service import Service
from ingot.protocol.chat.warm_prompts import warm_request
from ingot.text.prompt.prompt_files import read_prompts

log = logging.getLogger("ingot.warm")


def warm_requests(service: Service, settings: Settings) -> list[Request]:
    """One for each prompt and tenant. Raises ConfigError that names what is wrong, and where."""
    if settings.warm_prompts is None:
        return []
    prompts = read_prompts(settings.warm_prompts)
    return [
        warm_request(prompt, service.served_to(tenant), f"warm-{secrets.token_hex(12)}")
        for tenant in service.tenants.names
        for prompt in prompts
    ]


async def warm(service: Service, requests: Sequence[Request]) -> None:
    """Compute them one after another; what goes wrong with one is logged and keeps nobody waiting."""
    if not requests:
        return
    tokens = sum(len(request.prompts[0]) for request in requests)
    log.info("warming %d prompts of %d tokens in all, while nothing else runs", len(requests), tokens)
    for request in requests:
        try:
            await _run(service, request)
        except IngotError as error:
            log.warning("a prompt of %d tokens was not warmed: %s", len(request.prompts[0]), error.message)
    tenants = {request.tenant for request in requests}
    kept = [await asyncio.to_thread(service.engine.kept.status, tenant) for tenant in tenants]
    pinned = sum(salt.pinned_tokens for status in kept for salt in status.salts)
    log.info("warm: %d tokens are pinned", pinned)


async def _run(service: Service, request: Request) -> None:
    stream = await service.engine.open(request)
    try:
        async for events in stream:
            if isinstance(events[-1], Failed):
                raise events[-1].error
    finally:
        stream.close()

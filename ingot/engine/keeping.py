"""The kept prefixes as other threads may ask about them. Each call runs on the engine thread, between two steps.

A caller names the tenant it speaks for, and is told about that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ingot.cache.tree import Node, Owner
from ingot.engine.request import CacheReport, CacheStatus, Request, SaltStatus
from ingot.engine.reuse import Reuse

T = TypeVar("T")


class OnThread(Protocol):
    def __call__(self, work: Callable[[Reuse], T]) -> T:
        """Run `work` on the engine thread and wait for what it gives or raises."""
        ...


class Keeping:
    def __init__(self, run: OnThread) -> None:
        self._run = run

    def status(self, tenant: str) -> CacheStatus:
        return self._run(lambda reuse: _status(reuse, tenant))

    def explain(self, request: Request, number: int) -> CacheReport:
        """What one of the request's prompts would take over if it came now. Leaves no trace."""
        return self._run(lambda reuse: reuse.explain(request, request.prompts[number]))

    def clear(self, tenant: str) -> int:
        """Forget all that is kept for a tenant, pinned or not; returns the bytes that this frees."""
        return self._run(lambda reuse: reuse.index.clear(tenant))


def _status(reuse: Reuse, tenant: str) -> CacheStatus:
    index, counts = reuse.index, reuse.counts[tenant]
    return CacheStatus(
        limit_bytes=reuse.limit,
        used_bytes=index.nbytes,
        evictions=index.evictions,
        prompts=counts.prompts,
        hits=counts.hits,
        prompt_tokens=counts.prompt_tokens,
        matched_tokens=counts.matched_tokens,
        salts=tuple(_salt(salt, index.nodes(Owner(tenant, salt))) for salt in index.salts(tenant)),
    )


def _salt(salt: str, nodes: Iterable[Node]) -> SaltStatus:
    held = [(node, node.record) for node in nodes if node.record is not None]
    return SaltStatus(
        salt,
        records=len(held),
        tokens=sum(len(node.tokens) for node, _ in held),
        checkpoints=sum(node.has_checkpoint for node, _ in held),
        pinned_tokens=sum(len(node.tokens) for node, _ in held if node.pinned),
        bytes=sum(record.nbytes for _, record in held),
    )

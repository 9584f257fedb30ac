"""`GET /v1/loads`: how busy the server is, as SGLang's routers ask. A model is a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from ingot.engine.model_card import ModelCard
from ingot.engine.request import RequestStatus
from ingot.observe.metrics import Figures


class Load(Struct, kw_only=True):
    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


class LoadsBody(Struct, kw_only=True):
    timestamp: str  # in ISO's form: routers that read it are strict
    dp_rank_count: int = 1
    loads: list[Load]


def loads(models: Iterable[tuple[ModelCard, Sequence[RequestStatus], Figures]]) -> LoadsBody:
    """A rank for each model that is loaded."""
    ranks = [_load(rank, *model) for rank, model in enumerate(models)]
    return LoadsBody(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=len(ranks), loads=ranks)


def _load(rank: int, card: ModelCard, statuses: Sequence[RequestStatus], figures: Figures) -> Load:
    """Tokens of prompts that wait count as a whole: what is kept of them is known when their turn comes."""
    running = [status for status in statuses if status.phase != "queued"]
    waiting = [status for status in statuses if status.phase == "queued"]
    return Load(
        dp_rank=rank,
        num_running_reqs=len(running),
        num_waiting_reqs=len(waiting),
        num_waiting_uncached_tokens=sum(status.prompt_tokens for status in waiting),
        num_total_reqs=len(statuses),
        num_used_tokens=sum(status.prefilled_tokens + status.completion_tokens for status in running),
        max_total_num_tokens=figures.most_tokens,
        token_usage=round(figures.occupied, 4),
        gen_throughput=round(sum((status.tokens_per_second for status in running), 0.0), 2),
        cache_hit_rate=round(figures.matched_tokens / max(1, figures.asked_tokens), 4),
        utilization=round(len(running) / card.max_sequences, 4),
        max_running_requests=card.max_sequences,
    )

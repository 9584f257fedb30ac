"""The processes that run a model together, as `GET /metrics` tells of them."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.distributed.heartbeat import Standing
from ingot.observe.prometheus import Metric
from ingot.protocol.ingot_api.metrics import Family


def rank_metrics(model: str, standings: Sequence[Standing]) -> Sequence[Metric]:
    """Nothing for a model that one process runs."""
    if not standings:
        return ()
    told = Family("ingot_rank_", {"model_name": model})
    by_rank = [({"rank": str(one.rank)}, one) for one in standings]
    return (
        told.gauges("step", "The last step that the process did.", [(rank, one.step) for rank, one in by_rank]),
        told.gauges("silent_seconds", "Since its last sign of life.", [(rank, one.silent_s) for rank, one in by_rank]),
        told.gauges("late_seconds", "Since it ought to have gone on.", [(rank, one.late_s) for rank, one in by_rank]),
    )

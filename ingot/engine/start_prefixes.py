"""Where computed prefixes are kept, in what, and who is told of them."""

from __future__ import annotations

from pathlib import Path

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.disk.disk import Disk
from ingot.config import Settings, memory_bytes
from ingot.engine.kv_events import Address, Publisher
from ingot.engine.memory_budget import Budget
from ingot.errors import ConfigError
from ingot.models.adapter import Adapter
from ingot.models.kept_files import open_disk
from ingot.ranks.joining import Joined
from ingot.ranks.leader import LeadingAdapter


def prefix_bytes(settings: Settings, budget: Budget) -> int:
    """The most memory that they may take."""
    if not settings.prefix_cache:
        return 0
    return memory_bytes(settings.cache_memory, budget.states) if settings.cache_memory else budget.states // 2


def prefix_codec(settings: Settings, adapter: Adapter) -> PairCodec:
    """What kept records are put into. Raises ConfigError where that would wreck the model."""
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    if codec.lossy and adapter.has_sinks:
        raise ConfigError(
            f"cache_codec {codec.name} cannot be used: this model's attention has sinks, which weigh keys against a "
            "fixed number, so that small errors in keys change what it attends to. Use cache_codec raw.",
            param="cache_codec",
        )
    return codec


def prefix_disk(
    settings: Settings, adapter: Adapter, folder: Path, codec: PairCodec, joined: Joined | None
) -> Disk | None:
    """None where they are kept in memory alone. Raises ConfigError."""
    if not isinstance(adapter, LeadingAdapter) or joined is None:
        return open_disk(settings, adapter, folder, codec)
    own = open_disk(settings, adapter, folder, codec, joined.sharing.part)
    return None if own is None else adapter.lead_disk(own)


def prefix_teller(settings: Settings) -> Publisher | None:
    if settings.kv_events is None:
        return None
    return Publisher(Address(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic or ""))

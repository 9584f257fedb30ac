"""Rank 0 of several: its share of the model, and what all ranks have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ingot.config import Settings
from ingot.distributed.group import Share
from ingot.engine.speculation.options import PROPOSERS, Choice
from ingot.errors import ConfigError, ModelError
from ingot.kernels.device import Device
from ingot.models.adapter import Adapter
from ingot.ranks.joining import Joined, join_group, stated_place
from ingot.ranks.leader import LeadingAdapter, lead

HEADS: Final = ("mtp", "eagle")
PLAIN: Final = ("forced", "lookup")
"""Who guess from tokens alone."""
LOADING_S: Final = 3600.0
"""How long the others may take to load what they have of the model, once rank 0 has its own."""


def join_as_leader(settings: Settings) -> Joined | None:
    """None where the model runs in one process. Raises ConfigError."""
    where = stated_place(settings)
    if where is None:
        return None
    if where.rank:
        raise ConfigError(f"Rank {where.rank} follows; only rank 0 starts an engine.")
    return join_group(settings, where)


def load_leading(
    joined: Joined, settings: Settings, folder: Path, here: Device, total: int, *, sees: bool
) -> LeadingAdapter:
    """Raises ModelError or ConfigError, or Unavailable where another rank is gone."""
    if sees:
        raise ModelError("Models that see are not run by several ranks: serve it with --text-only.")
    own = joined.load(folder, here, settings)
    kept = joined.kept_form(own, settings)
    share = Share.of(own, total, {} if kept is None else kept.sizes)
    leading = lead(share, own, joined.links, joined.sharing.group, LOADING_S)
    if kept is not None and not leading.whole.forgets:
        raise ConfigError(
            "cache_codec and cache_dir cannot be used: rank 0 has no layers of a kind that other ranks have, so that "
            "it cannot say what they have of a record. Leave them out, or use other ranks."
        )
    return leading


def withheld(adapter: Adapter, total: int) -> int:
    """Of `total` bytes, what rank 0 leaves free as another rank has no more."""
    return max(0, total - adapter.weight_bytes - adapter.whole.spare) if isinstance(adapter, LeadingAdapter) else 0


def among_ranks(choice: Choice, adapter: LeadingAdapter) -> Choice:
    """Who may guess ahead. Raises ConfigError where somebody is asked for who cannot."""
    if not adapter.whole.rewinds:
        return _without(
            choice,
            PROPOSERS,
            "rank 0 has none of the model's recurrent layers, so that it cannot say how far others go back. Use "
            "speculate off, or other ranks.",
        )
    if adapter.live is not None:
        return _without(
            choice, HEADS, "what a head keeps is not put into kv_codec where there are several ranks. Leave out one."
        )
    return choice


def _without(choice: Choice, refused: Sequence[str], reason: str) -> Choice:
    asked = [name for name in choice.names or () if name in refused]
    if asked:
        raise ConfigError(f"speculate {asked[0]}: {reason}")
    plain = tuple(name for name in PLAIN if name not in refused)
    return replace(choice, names=plain) if choice.names is None else choice

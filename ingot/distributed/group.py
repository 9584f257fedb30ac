"""Joining a group of ranks and loading this rank's share of a model, on every rank alike; a rank's facts about its
share, and what holds for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.footprint import Footprint, GatherCost
from ingot.cache.kv_deltas import DeltaCodec, EncodedSize
from ingot.cache.record_encoding import check_codec_fits, encode_form
from ingot.cache.records import RecordForm
from ingot.config import Settings
from ingot.distributed.place import HOSTFILE_VARIABLE, RankConfig, read_rank_config
from ingot.distributed.wire import Link
from ingot.errors import ConfigError, ModelError
from ingot.kernels import device
from ingot.kernels.device import Device
from ingot.models import adapter as adapters
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import record_form_of, with_kv_codec
from ingot.models.parallelism import ModelSharding

JOIN_TIMEOUT_S: Final = 120.0
"""How long ranks wait for each other at the start."""


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A group of which every rank has started, and nothing is loaded yet."""

    sharing: ModelSharding
    links: Sequence[Link]  # to the followers, or to rank 0
    neighbours: int  # ranks on this machine, this one among them

    def memory_budget(self, here: Device, requested: str | None) -> int:
        """Bytes for this rank, on a machine that it may share with others."""
        total = device.memory_budget(here, requested)
        return total if here.kind == "cuda" else total // self.neighbours

    def load(self, folder: Path, here: Device, settings: Settings) -> ModelAdapter:
        """This rank's share. All ranks have to call it at once. Raises ModelError, ConfigError."""
        adapter = adapters.load_model_adapter(
            folder,
            here,
            dtype=settings.dtype,
            widest=settings.prefill_chunk,
            sharing=self.sharing,
            experts=settings.moe_top_k,
        )
        if adapter.selection is None:
            raise ModelError("The output head of this family is not known; several ranks cannot run it.")
        return with_kv_codec(adapter, PairCodec(CodecName.parse(settings.kv_codec)), is_share=True)

    def record_form(self, adapter: ModelAdapter, settings: Settings) -> RankRecordForm | None:
        """None where records never leave their pages. All ranks have to call it at once. Raises ConfigError where the
        codec does not fit this rank's layers."""
        codec = RecordCodec(CodecName.parse(settings.cache_codec))
        return RankRecordForm.of(adapter, codec) if codec.lossy or settings.cache_dir is not None else None


@dataclass(frozen=True, slots=True)
class RankRecordForm:
    """The form of this rank's part of a record outside of pages."""

    form: RecordForm  # as it is written to files
    codec: DeltaCodec | None = None
    sizes: Mapping[int | None, EncodedSize] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: ModelAdapter, codec: PairCodec) -> RankRecordForm:
        rows = adapter.new_batch_state()
        raw = record_form_of(adapter, rows)
        if not codec.lossy:
            return cls(raw)
        delta_codec = DeltaCodec(codec, raw.sample.deltas)
        check_codec_fits(codec, delta_codec)
        return cls(encode_form(delta_codec, raw), delta_codec, delta_codec.sizes(rows.states))


def rank_config_from_settings(settings: Settings, environment: Mapping[str, str] = os.environ) -> RankConfig | None:
    """None for a process without a group. Raises ConfigError where settings and environment disagree."""
    found = read_rank_config(environment)
    size = 1 if found is None else found.size
    if size != settings.ranks:
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size ask for {settings.ranks} ranks, but this process was "
            f"started as one of {size}."
        )
    return found


def join_group(settings: Settings, where: RankConfig) -> JoinedGroup:
    """Connect to the other ranks. Runs on the thread that uses mlx. Raises LinkLate, LinkLost, or mlx's
    RuntimeError."""
    links = where.links(JOIN_TIMEOUT_S)
    group: Any = mx.distributed.init(strict=True)
    if (group.rank(), group.size()) != (where.rank, where.size):
        raise ConfigError(f"mlx has rank {group.rank()} of {group.size()}, not {where.rank} of {where.size}.")
    sharing = ModelSharding("tensor" if settings.tensor_parallel_size > 1 else "pipeline", group)
    return JoinedGroup(sharing, links, _ranks_on_this_host(where, os.environ.get(HOSTFILE_VARIABLE)))


def _ranks_on_this_host(where: RankConfig, hostfile: str | None) -> int:
    """Ranks with the same address as this one."""
    if not hostfile:
        return 1
    hosts = [entry[0].rpartition(":")[0] for entry in json.loads(Path(hostfile).read_text())]
    return hosts.count(hosts[where.rank])


SIZES: Final = ("recurrent", "activation", "score", "logits", "scratch", "coded")
"""Fields of a footprint of which the largest holds for all ranks."""


class RankShare(msgspec.Struct, frozen=True):
    """Bytes, as in `Footprint`; `spare` is what its weights leave, `encoded` the sizes of compressed records
    (`DeltaCodec.sizes`), where there is a codec."""

    groups: list[tuple[int | None, int]]
    recurrent: int
    activation: int
    score: int
    logits: int
    scratch: int
    tile: int | None
    gathered: tuple[int, int, int, int]
    coded: int
    ragged: bool
    mixed: bool
    vocab: int
    spare: int
    encoded: list[tuple[int | None, int, int]]

    @classmethod
    def of(cls, adapter: ModelAdapter, total: int, encoded: Mapping[int | None, EncodedSize]) -> RankShare:
        return cls(
            **{each.name: getattr(adapter.footprint, each.name) for each in fields(Footprint)},
            ragged=adapter.ragged,
            mixed=adapter.mixed,
            vocab=adapter.vocab,
            spare=total - adapter.weight_bytes,
            encoded=[(window, *size) for window, size in encoded.items()],
        )


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """What holds for all ranks: what fits into it fits on each of them."""

    footprint: Footprint
    ragged: bool
    mixed: bool
    spare: int
    rewinds: bool
    """Whether rank 0 knows how far a row can be rewound: it has recurrent layers if any rank has."""
    forgets: bool
    """Whether rank 0 has layers of every window that any rank has, and so knows what all have of a record."""
    encoded: Mapping[int | None, EncodedSize]
    heavier: float
    """How many times larger than on rank 0 a record is on the rank where it is largest."""

    @classmethod
    def of(cls, shares: Sequence[RankShare]) -> GroupTotals:
        groups, leader = _largest_groups(shares), shares[0]
        tiles = [share.tile for share in shares]
        sizes = {name: max(getattr(share, name) for share in shares) for name in SIZES}
        return cls(
            Footprint(
                groups=groups,
                tile=None if None in tiles else max(tile for tile in tiles if tile is not None),
                gathered=GatherCost(*map(max, *(share.gathered for share in shares))),
                **sizes,
            ),
            ragged=all(share.ragged for share in shares),
            mixed=all(share.mixed for share in shares),
            spare=min(share.spare for share in shares),
            rewinds=leader.recurrent > 0 or not any(share.recurrent for share in shares),
            forgets={window for window, _ in leader.groups} == {window for window, _ in groups},
            encoded=_largest_encoded(shares),
            heavier=max(1.0, sum(size for _, size in groups) / max(1, sum(size for _, size in leader.groups))),
        )


def _largest_groups(shares: Iterable[RankShare]) -> tuple[tuple[int | None, int], ...]:
    sizes: dict[int | None, int] = {}
    for share in shares:
        for window, size in share.groups:
            sizes[window] = max(sizes.get(window, 0), size)
    return tuple(sizes.items())


def _largest_encoded(shares: Iterable[RankShare]) -> dict[int | None, EncodedSize]:
    sizes: dict[int | None, EncodedSize] = {}
    for share in shares:
        for window, any_tokens, each in share.encoded:
            most = sizes.get(window, (0, 0))
            sizes[window] = max(most[0], any_tokens), max(most[1], each)
    return sizes

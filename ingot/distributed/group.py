"""From a place in a group of ranks to this one's share of a model, on every rank alike; what a rank found out about its
share, and what all of them come to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from ingot.distributed.place import HOSTFILE_VARIABLE, RankPlace, read_rank_place
from ingot.distributed.wire import Link
from ingot.errors import ConfigError, ModelError
from ingot.kernels import device
from ingot.kernels.device import Device
from ingot.models import adapter as adapters
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import record_form_of, with_kv_codec
from ingot.models.parallelism import ModelSharding

JOIN_TIMEOUT_S: Final = 120.0
"""How long ranks wait for each other to start."""


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A group that is there: every rank has started, and nothing is loaded yet."""

    sharing: ModelSharding
    links: Sequence[Link]  # to the followers, or to rank 0
    neighbours: int  # ranks on this machine, this one among them

    def memory_budget(self, here: Device, asked: str | None) -> int:
        """Bytes for this rank, of a machine that it may share with others."""
        total = device.memory_budget(here, asked)
        return total if here.kind == "cuda" else total // self.neighbours

    def load(self, folder: Path, here: Device, settings: Settings) -> ModelAdapter:
        """This rank's share. All ranks have to call it at once. Raises ModelError, ConfigError."""
        adapter = adapters.load_model_adapter(
            folder, here, dtype=settings.dtype, widest=settings.prefill_chunk, sharing=self.sharing
        )
        if adapter.selection is None:
            raise ModelError("The output head of this family is not known; it cannot be run by several ranks.")
        return with_kv_codec(adapter, PairCodec(CodecName.parse(settings.kv_codec)), is_share=True)

    def kept_form(self, adapter: ModelAdapter, settings: Settings) -> RankRecordForm | None:
        """None where records never leave their pages. All ranks have to call it at once. Raises ConfigError where this
        rank's layers cannot be put into the codec."""
        codec = RecordCodec(CodecName.parse(settings.cache_codec))
        return RankRecordForm.of(adapter, codec) if codec.lossy or settings.cache_dir is not None else None


@dataclass(frozen=True, slots=True)
class RankRecordForm:
    """What this rank's part of a record is outside of pages."""

    form: RecordForm  # as it is written to files
    codec: DeltaCodec | None = None
    sizes: Mapping[int | None, EncodedSize] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: ModelAdapter, codec: PairCodec) -> RankRecordForm:
        rows = adapter.new_batch_state()
        raw = record_form_of(adapter, rows)
        if not codec.lossy:
            return cls(raw)
        met = DeltaCodec(codec, raw.sample.deltas)
        check_codec_fits(codec, met)
        return cls(encode_form(met, raw), met, met.sizes(rows.states))


def place_from_settings(settings: Settings, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """None for a process that is alone. Raises ConfigError where settings and environment say different things."""
    found = read_rank_place(environment)
    size = 1 if found is None else found.size
    if size != settings.ranks:
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size ask for {settings.ranks} ranks, and this process is "
            f"started as one of {size}."
        )
    return found


def join_group(settings: Settings, where: RankPlace) -> JoinedGroup:
    """Meet the others. Runs on the thread that uses mlx. Raises LinkLate, LinkLost, or RuntimeError of mlx's."""
    links = where.links(JOIN_TIMEOUT_S)
    group: Any = mx.distributed.init(strict=True)
    if (group.rank(), group.size()) != (where.rank, where.size):
        raise ConfigError(f"mlx says rank {group.rank()} of {group.size()}, not {where.rank} of {where.size}.")
    sharing = ModelSharding("tensor" if settings.tensor_parallel_size > 1 else "pipeline", group)
    return JoinedGroup(sharing, links, _ranks_on_this_host(where, os.environ.get(HOSTFILE_VARIABLE)))


def _ranks_on_this_host(where: RankPlace, hostfile: str | None) -> int:
    """Ranks that are reached at the same address as this one."""
    if not hostfile:
        return 1
    hosts = [entry[0].rpartition(":")[0] for entry in json.loads(Path(hostfile).read_text())]
    return hosts.count(hosts[where.rank])


class RankShare(msgspec.Struct, frozen=True):
    """Bytes, as in `Footprint`; `spare` are those that its weights leave, `encoded` what kept records take in fewer
    bits (`DeltaCodec.sizes`), where they are put into some."""

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
        shape = adapter.footprint
        return cls(
            list(shape.groups),
            shape.recurrent,
            shape.activation,
            shape.score,
            shape.logits,
            shape.scratch,
            shape.tile,
            shape.gathered,
            shape.coded,
            adapter.ragged,
            adapter.mixed,
            adapter.vocab,
            total - adapter.weight_bytes,
            [(window, *size) for window, size in encoded.items()],
        )


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """What holds for all ranks: whatever fits into it fits on each of them."""

    footprint: Footprint
    ragged: bool
    mixed: bool
    spare: int
    rewinds: bool
    """Whether rank 0 sees how far a row goes back: it has recurrent layers if any rank has."""
    forgets: bool
    """Whether rank 0 has layers of every window that any rank has: it knows then what all have of a record."""
    encoded: Mapping[int | None, EncodedSize]
    heavier: float
    """How many times as much as on rank 0 a record takes where it takes most."""

    @classmethod
    def of(cls, shares: Sequence[RankShare]) -> GroupTotals:
        return cls(
            Footprint(
                groups=_largest_groups(shares),
                recurrent=max(share.recurrent for share in shares),
                activation=max(share.activation for share in shares),
                score=max(share.score for share in shares),
                logits=max(share.logits for share in shares),
                scratch=max(share.scratch for share in shares),
                tile=_widest_tile(share.tile for share in shares),
                gathered=GatherCost(*map(max, *(share.gathered for share in shares))),
                coded=max(share.coded for share in shares),
            ),
            all(share.ragged for share in shares),
            all(share.mixed for share in shares),
            min(share.spare for share in shares),
            shares[0].recurrent > 0 or not any(share.recurrent for share in shares),
            {window for window, _ in shares[0].groups} == {window for share in shares for window, _ in share.groups},
            _largest_encoded(shares),
            max(
                1.0,
                sum(size for _, size in _largest_groups(shares)) / max(1, sum(size for _, size in shares[0].groups)),
            ),
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


def _widest_tile(tiles: Iterable[int | None]) -> int | None:
    """None is all tokens at once."""
    known = list(tiles)
    return None if None in known else max(tile for tile in known if tile is not None)

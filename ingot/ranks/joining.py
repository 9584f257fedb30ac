"""From a place in a group of ranks to this one's share of a model, on every rank alike."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.delta_codec import DeltaCodec, Size
from ingot.cache.packing import Form
from ingot.cache.record_encoding import check_codec, encoded_form
from ingot.config import Settings
from ingot.distributed.place import HOSTFILE, Place, place
from ingot.distributed.wire import Link
from ingot.errors import ConfigError, ModelError
from ingot.kernels import device
from ingot.kernels.device import Device
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter
from ingot.models.form import form_of
from ingot.models.kv_codec import with_live_codec
from ingot.models.parallelism import Sharing

MEETING_S: Final = 120.0
"""How long ranks wait for each other to start."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A group that is there: every rank has started, and nothing is loaded yet."""

    sharing: Sharing
    links: Sequence[Link]  # to the followers, or to rank 0
    neighbours: int  # ranks on this machine, this one among them

    def memory_budget(self, here: Device, asked: str | None) -> int:
        """Bytes for this rank, of a machine that it may share with others."""
        total = device.memory_budget(here, asked)
        return total if here.kind == "cuda" else total // self.neighbours

    def load(self, folder: Path, here: Device, settings: Settings) -> Adapter:
        """This rank's share. All ranks have to call it at once. Raises ModelError, ConfigError."""
        adapter = adapters.load(folder, here, dtype=settings.dtype, widest=settings.prefill_chunk, sharing=self.sharing)
        if adapter.selection is None:
            raise ModelError("The output head of this family is not known; it cannot be run by several ranks.")
        return with_live_codec(adapter, PairCodec(CodecName.parse(settings.kv_codec)), is_share=True)

    def kept_form(self, adapter: Adapter, settings: Settings) -> KeptForm | None:
        """None where records never leave their pages. All ranks have to call it at once. Raises ConfigError where this
        rank's layers cannot be put into the codec."""
        codec = RecordCodec(CodecName.parse(settings.cache_codec))
        return KeptForm.of(adapter, codec) if codec.lossy or settings.cache_dir is not None else None


@dataclass(frozen=True, slots=True)
class KeptForm:
    """What this rank's part of a record is outside of pages."""

    form: Form  # as it is written to files
    codec: DeltaCodec | None = None
    sizes: Mapping[int | None, Size] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: Adapter, codec: PairCodec) -> KeptForm:
        rows = adapter.new_rows()
        raw = form_of(adapter, rows)
        if not codec.lossy:
            return cls(raw)
        met = DeltaCodec(codec, raw.sample.deltas)
        check_codec(codec, met)
        return cls(encoded_form(met, raw), met, met.sizes(rows.states))


def stated_place(settings: Settings, environment: Mapping[str, str] = os.environ) -> Place | None:
    """None for a process that is alone. Raises ConfigError where settings and environment say different things."""
    found = place(environment)
    size = 1 if found is None else found.size
    if size != settings.ranks:
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size ask for {settings.ranks} ranks, and this process is "
            f"started as one of {size}."
        )
    return found


def join_group(settings: Settings, where: Place) -> Joined:
    """Meet the others. Runs on the thread that uses mlx. Raises LinkLate, LinkLost, or RuntimeError of mlx's."""
    links = where.links(MEETING_S)
    group: Any = mx.distributed.init(strict=True)
    if (group.rank(), group.size()) != (where.rank, where.size):
        raise ConfigError(f"mlx says rank {group.rank()} of {group.size()}, not {where.rank} of {where.size}.")
    sharing = Sharing("tensor" if settings.tensor_parallel_size > 1 else "pipeline", group)
    return Joined(sharing, links, _neighbours(where, os.environ.get(HOSTFILE)))


def _neighbours(where: Place, hostfile: str | None) -> int:
    """Ranks that are reached at the same address as this one."""
    if not hostfile:
        return 1
    hosts = [entry[0].rpartition(":")[0] for entry in json.loads(Path(hostfile).read_text())]
    return hosts.count(hosts[where.rank])

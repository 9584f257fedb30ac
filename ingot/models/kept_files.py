"""Where states of a model are kept in files: the folder that settings name, under all that they depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.store import DIGESTS, DiskLimits, RecordStore, folder_secret, unusable
from ingot.config import Settings
from ingot.models.adapter import Adapter
from ingot.models.states_key import exact_key

GB: Final = 1_000_000_000


def open_disk(settings: Settings, adapter: Adapter, folder: Path, codec: PairCodec, part: str = "") -> Disk | None:
    """None where no folder is named. `part` says which of a model's states are this process's, where it has some alone.
    Raises ConfigError where the folder cannot be used."""
    where = settings.cache_dir
    if where is None:
        return None
    secret = folder_secret(where, settings.archive_key_file)
    limits = DiskLimits(
        int(settings.cache_disk_gb * GB), int(settings.cache_disk_free_gb * GB), settings.cache_disk_sync
    )
    try:
        exact = settings.deterministic
        key = exact_key(adapter, folder, codec, where / DIGESTS, secret, deterministic=exact, part=part)
        return Disk.of(RecordStore(where, key, limits, secret))
    except OSError as error:
        raise unusable(where, error) from error

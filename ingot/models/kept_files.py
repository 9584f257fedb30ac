"""Where states of a model are kept in files: the folder that settings name, under all that they depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.files import FOLDER_MODE, Files
from ingot.cache.disk.store import DiskLimits
from ingot.config import Settings
from ingot.config.archive_key import ArchiveKey
from ingot.errors import ConfigError, Unavailable
from ingot.models.adapter import Adapter
from ingot.models.states_key import exact_key

GB: Final = 1_000_000_000


def open_disk(settings: Settings, adapter: Adapter, folder: Path, codec: PairCodec, part: str = "") -> Disk | None:
    """None where no folder is named. `part` says which of a model's states are this process's, where it has some alone.
    Raises ConfigError where the folder cannot be used."""
    where = settings.cache_dir
    if where is None:
        return None
    limits = DiskLimits(
        int(settings.cache_disk_gb * GB), int(settings.cache_disk_free_gb * GB), settings.cache_disk_sync
    )
    try:
        where.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        Files().check_private(where, ("digests.json",))
        secret = ArchiveKey(settings.archive_key_file.expanduser()).secret()
        digests = where / "digests.json"
        key = exact_key(adapter, folder, codec, digests, deterministic=settings.deterministic, part=part)
        return Disk.open(where, key, limits, secret)
    except Unavailable as error:
        raise ConfigError(
            f"cache_dir {where} cannot be used without the key that records are sealed with, archive_key_file "
            f"{settings.archive_key_file}: {error.__cause__}",
            param="archive_key_file",
        ) from error
    except OSError as error:
        raise ConfigError(f"cache_dir {where} cannot be used: {error.strerror}", param="cache_dir") from error

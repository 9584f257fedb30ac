"""`ingot rm MODEL...`: removes models that were fetched or converted, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.errors import ConfigError, ModelError

ABOUT = "Remove models that were fetched or converted. Files and folders of your own are left alone."


@dataclass(frozen=True, slots=True)
class Removable:
    told: str
    size: int  # bytes
    remove: Callable[[], None]


def run(arguments: list[str]) -> int:
    parser = CommandParser("rm", ABOUT)
    parser.add_argument("named", nargs="+", metavar="MODEL", help="a name that `ingot models` lists")
    parser.flag("--yes", action="store_true", help="remove them without asking")
    add_settings(parser, ("the model", "the rest"), leave_out=("offline", "context", "dtype", "chat_template"))
    namespace = parser.parse(arguments)
    models_dir = settle(namespace).settings.models_dir.expanduser()
    found = [removable(name, models_dir) for name in namespace.named]
    if "yes" not in vars(namespace) and not _agreed(found):
        print("nothing was removed", file=sys.stderr)
        return 1
    for one in found:
        one.remove()
        print(f"removed {one.told}")
    return 0


def removable(name: str, models_dir: Path) -> Removable:
    """The model of that name. Raises ModelError for what is not ingot's to remove, or not there."""
    from ingot.models.files import packaged
    from ingot.models.files.model_store import named, remove
    from ingot.models.files.progress import silent

    model = packaged.find(name)
    kept = named(model.name if model else name, models_dir)
    if kept is not None:
        return Removable(f"{kept.path.name} from the models folder", kept.size, lambda: remove(kept, silent))
    if model is not None:
        raise ModelError(f"{model.name} has not been fetched, so there is nothing to remove")
    if Path(name).expanduser().exists() or (models_dir / name).exists():
        raise ModelError(f"{name} is a file or folder of your own: ingot did not put it there and does not remove it")
    if (cached := _cached(name)) is not None:
        return cached
    raise ModelError(f"there is no model {name!r} here; `ingot models` lists those that are")


def _cached(name: str) -> Removable | None:
    """A model in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return None
    for repository in cache.repos:
        if repository.repo_type == "model" and repository.repo_id == name:
            revisions = cache.delete_revisions(*(revision.commit_hash for revision in repository.revisions))
            told = f"{name} from the hub's cache, which other programs share"
            return Removable(told, repository.size_on_disk, revisions.execute)
    return None


def _agreed(found: list[Removable]) -> bool:
    from ingot.models.files.progress import format_bytes

    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes to remove without being asked")
    for one in found:
        print(f"{one.told} ({format_bytes(one.size)})")
    return input("Remove? [y/N] ").strip().lower() in ("y", "yes")

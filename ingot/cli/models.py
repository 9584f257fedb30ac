"""`ingot models`: those that are here, and those that can be fetched by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ingot.cli.flags import CommandParser, add_settings, settle

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

    from ingot.models.files.model_store import ShelvedModel
    from ingot.models.memory_needs import MemoryNeeds

ABOUT = "List the models that are here, and those that can be fetched by name."


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """`name` is what `ingot serve` takes; without a `path` the model is not here yet."""

    name: str
    kind: Literal["packaged", "local", "hub"]
    bytes: int
    path: str | None
    source: str
    memory: dict[str, int] | None = None  # what it takes when it is served, where its files tell


def run(arguments: list[str]) -> int:
    parser = CommandParser("models", ABOUT)
    parser.flag("--json", action="store_true", help="print the list as JSON")
    leave_out = ("offline", "context", "dtype", "chat_template")
    add_settings(parser, ("the model", "the rest"), leave_out=leave_out)
    namespace = parser.parse(arguments)
    folder = settle(namespace).settings.models_dir
    listed = [_with_memory(model) for model in (*packaged(folder), *local(folder), *cached_from_hub())]
    if "json" in vars(namespace):
        print(json.dumps({"models_dir": str(folder), "models": [asdict(model) for model in listed]}, indent=2))
    else:
        print(_table(listed))
    return 0


def packaged(folder: Path) -> Iterator[ModelEntry]:
    from ingot.models.files.model_store import inventory
    from ingot.models.files.packaged import PACKAGED

    here = {kept.path: kept for kept in inventory(folder)}
    for model in PACKAGED:
        kept = here.get(folder / model.name)
        size, path = (kept.size, str(kept.path)) if kept else (model.size, None)
        yield ModelEntry(model.name, "packaged", size, path, model.origin["source"])


def local(folder: Path) -> Iterator[ModelEntry]:
    """Folders and .gguf files in the models folder, whether ingot put them there or the user did."""
    from ingot.models.files.model_store import inventory
    from ingot.models.files.packaged import names

    shelf = inventory(folder)
    sources, called = {kept.path: kept.source for kept in shelf}, _called(shelf)
    for path in sorted(folder.glob("*")):
        if path.name.startswith(".") or path.name in names():
            continue
        if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
            name = called.get(path, str(path))
            yield ModelEntry(name, "local", _size(path), str(path), sources.get(path, str(path)))


def _called(shelf: list[ShelvedModel]) -> dict[Path, str]:
    """The shortest name of each: without its hash, where no other has the same."""
    times = Counter(kept.name.lower() for kept in shelf)
    return {kept.path: kept.name if times[kept.name.lower()] == 1 else kept.path.name for kept in shelf}


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def cached_from_hub() -> Iterator[ModelEntry]:
    """What `huggingface_hub` has fetched for anyone on this machine."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        if repository.repo_type == "model":
            name, path = repository.repo_id, str(max(repository.revisions, key=_age).snapshot_path)
            yield ModelEntry(name, "hub", repository.size_on_disk, path, f"hub:{name}")


def _age(revision: CachedRevisionInfo) -> float:
    return revision.last_modified


def _with_memory(model: ModelEntry) -> ModelEntry:
    if model.path is None:
        return model
    from ingot.kernels.device import current
    from ingot.models.memory_needs import needs

    needed = needs(Path(model.path), current())
    return model if needed is None else replace(model, memory=asdict(needed))


def describe(needed: MemoryNeeds) -> str:
    """What a model takes, in a sentence."""
    from ingot.models.files.progress import format_bytes

    weights, each, full = (format_bytes(n) for n in (needed.weights, needed.per_token, needed.at_full_context))
    sees = f" ({format_bytes(needed.tower)} of it to see, which --text-only leaves out)" if needed.tower else ""
    return (
        f"takes {weights} of memory{sees}, and {each} for each token of a sequence: {full} for all {needed.context:,}"
    )


def _table(listed: list[ModelEntry]) -> str:
    from ingot.models.files.progress import format_bytes

    width = max([len(model.name) for model in listed], default=0)

    def line(model: ModelEntry) -> str:
        taken = "" if model.memory is None else _taken(model.memory)
        return (
            f"{model.name:<{width}}  {model.kind:<8}  {format_bytes(model.bytes):>9}  {taken:<34}  "
            f"{model.path or 'not fetched yet'}"
        )

    return "\n".join(map(line, listed))


def _taken(memory: dict[str, int]) -> str:
    from ingot.models.files.progress import format_bytes

    return f"{format_bytes(memory['weights'])} in memory, {format_bytes(memory['per_token'])} a token"

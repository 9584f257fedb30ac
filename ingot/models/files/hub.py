"""Fetches models from the Hugging Face hub, into the cache that its other tools share. Imports the hub's library only
when it fetches."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.files.gguf_files import gguf_part_name
from ingot.models.files.model_store import is_disk_full
from ingot.models.files.progress import Progress

# Configuration, tokenizer and weights; never code, never pickled weights.
HUB_PATTERNS = [
    "*.json",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "model*.safetensors",
    "mtp.safetensors",  # draft heads, also in a folder of their own
    "mtp/*.safetensors",
    "*_Dense/model.safetensors",  # of sentence-transformers
    "kokoro*.safetensors",  # a text-to-speech model, and its voices
    "voices/*.safetensors",
]
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_GGUF_ID = re.compile(rf"(?P<repo>{_HUB_ID.pattern}):(?P<kind>[\w][\w.-]*)", re.ASCII)


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def split_gguf_id(name: str) -> tuple[str, str] | None:
    """The repository and the kind of file that "org/name:Q4_K_M" means; None for other names."""
    matched = _GGUF_ID.fullmatch(name)
    return matched and (matched["repo"], matched["kind"])


def fetch_gguf_from_hub(repo: str, kind: str, settings: Settings, progress: Progress) -> Path:
    """The GGUF file of `repo` that is quantised as `kind`, in the hub's cache: one of its parts, once all are there.

    Raises ModelError, also where there are none or several of that kind.
    """
    spelled = dict.fromkeys((kind, kind.lower(), kind.upper()))
    patterns = [f"*[-._/]{each}{end}.gguf" for each in spelled for end in ("", "-[0-9]*-of-[0-9]*")]
    folder = fetch_from_hub(repo, settings, progress, patterns)
    found = {
        part.stem if part else path.stem: path
        for path in sorted(folder.rglob("*.gguf"), reverse=True)
        if any(fnmatchcase(f"/{path.relative_to(folder).as_posix()}", pattern) for pattern in patterns)
        for part in [gguf_part_name(path.name)]
    }
    if len(found) != 1:
        several = f"several GGUF files of the kind {kind}: {', '.join(sorted(found))}"
        none = f"no GGUF file whose name ends in {kind}.gguf: see its files on the hub for the kinds that it has"
        raise ModelError(f"{repo} has {several if found else none}")
    return next(iter(found.values()))


def fetch_from_hub(repo: str, settings: Settings, progress: Progress, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The folder of `repo` ("org/name") in the hub's cache, brought up to date unless settings forbid the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    progress(f"looking up {repo}" if not settings.offline else f"looking for {repo} in the hub's cache")
    try:
        folder = snapshot_download(
            repo,
            allow_patterns=list(patterns),
            local_files_only=settings.offline,
            tqdm_class=_reporting_bar(f"fetching {repo}", progress),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its terms on its page on the hub, then log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {repo!r} on the hub, or it is private: check the name; for a private one "
            "log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        failed = _not_cached_message(repo, settings)
        raise ModelError(_disk_full_message(repo) if is_disk_full(error) else failed) from error
    except HFValidationError as error:
        raise ModelError(f"{repo!r} is no valid hub id") from error
    except HfHubHTTPError as error:
        raise ModelError(f"the hub answered {error.response.status_code} for {repo}; try again later") from error
    except OSError as error:
        failed = f"{repo} could not be stored: {error.strerror or error}"
        raise ModelError(_disk_full_message(repo) if is_disk_full(error) else failed) from error
    except Exception as error:
        # The errors of lost connections are those of the hub's HTTP library, which changes between versions.
        failed = f"fetching {repo} failed ({type(error).__name__}); run it again to resume"
        raise ModelError(_disk_full_message(repo) if is_disk_full(error) else failed) from error
    return Path(folder)


def cached_hub_folder(repo: str) -> Path | None:
    """The folder of `repo` in the hub's cache, if its config.json is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _disk_full_message(repo: str) -> str:
    return f"{repo} could not be stored: the disk is full. Free some space, or set HF_HOME to a folder on another disk"


def _not_cached_message(repo: str, settings: Settings) -> str:
    if settings.offline:
        return f"{repo} is not in the hub's cache and --offline forbids fetching it; run `ingot pull {repo}` once"
    return (
        f"the hub cannot be reached and {repo} is not in its cache: check the network and the proxy (HTTPS_PROXY, "
        "HF_ENDPOINT, HF_HUB_OFFLINE), or serve a local folder, a .gguf file or a packaged model"
    )


def _reporting_bar(message: str, progress: Progress) -> type[Any]:
    """A tqdm bar that reports to `progress` instead of the terminal.

    The hub's library has several: for files, for bytes received and for bytes stored. The furthest of those that count
    bytes is reported.
    """
    from huggingface_hub.utils import tqdm

    furthest = 0

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **options: Any) -> None:
            nonlocal furthest
            if self.unit == "B" and self.total:
                furthest = max(furthest, int(self.n))
                progress(message, min(furthest, int(self.total)), int(self.total))

    return ReportingBar

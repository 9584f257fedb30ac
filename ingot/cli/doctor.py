"""`ingot doctor`: what this machine offers, what is missing, and how to install it. Each function examines one thing;
none imports mlx. With `--measure` it starts the process that measures, shows its progress, and remembers what is slower
here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ingot.cli.flags import MODEL_FILE_SETTINGS, CommandParser, add_settings, settings_from_arguments
from ingot.config import DEFAULT_MODEL, GIB, Settings
from ingot.errors import IngotError
from ingot.extras import (
    EXTRA_USES,
    EXTRAS,
    extras_command,
    install_command,
    installed_version,
    missing_packages,
    requirement_name,
    unmet_requirements,
)
from ingot.kernels import device, measured
from ingot.kernels.device import Device
from ingot.measure.figures import LEAST_TURNS, Figure, Said, ratios_by_part
from ingot.models.files.drive_speed import read_speed
from ingot.models.files.model_store import is_stored
from ingot.models.files.packaged import find_packaged_model
from ingot.quantities import counted, format_bytes

ABOUT_DOCTOR = (
    "Show what this machine offers, what is missing and how to install it. Fails if something required is missing."
)
STATE_MARKS = {"ok": "ok", "note": "note", "missing": "MISSING"}


def run_doctor(arguments: list[str]) -> int:
    parser = CommandParser("doctor", ABOUT_DOCTOR)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the folder of a model, to show what of it would run slower than it could; with --measure any model that "
        "is on this machine",
    )
    parser.flag("--json", action="store_true", help="print the findings as JSON, to attach to a report")
    parser.flag(
        "--measure",
        action="store_true",
        help="also measure, in about two minutes: each kernel right or wrong on this device, and its time beside "
        "MLX's own; each lowered part of MODEL, or of the default model if it was pulled, and its tokens a second "
        "beside mlx-lm's. What is clearly slower here is left out from then on",
    )
    parser.flag(
        "--forget-measured",
        action="store_true",
        help="forget what was measured: nothing is left out any more",
    )
    parser.flag("--network", action="store_true", help="also check whether the model hub can be reached")
    add_settings(parser, ("the rest",), names=(*MODEL_FILE_SETTINGS, "cache_dir"))
    namespace = parser.parse(arguments)
    flags = vars(namespace)
    model = flags.pop("model", None)
    settings = settings_from_arguments(namespace).settings
    if "forget_measured" in flags:
        print(forget_measured(), file=sys.stderr)
        if "measure" not in flags:
            return 0
    folder = None if model is None or ("measure" in flags and not Path(model).is_dir()) else Path(model)
    findings = list(examine_machine(settings, network="network" in flags, model=folder))
    healthy = all(finding.state != "missing" for finding in findings)
    report: dict[str, Any] = {"ok": healthy, "findings": [asdict(finding) for finding in findings]}
    found = measure(model, settings, driver=_nvidia_driver()) if "measure" in flags else None
    if "json" in flags:
        print(json.dumps(report if found is None else {**report, "measured": found.as_json()}, indent=2))
    else:
        print(_format_findings(findings) + ("" if found is None else f"\n\n{found.as_table()}"))
    return 0 if healthy and (found is None or not found.wrong) else 1


def examine_machine(settings: Settings, network: bool, model: Path | None = None) -> Iterator[Finding]:
    load = examine_load()  # first: what follows is work
    probed = run_mlx_probe() if model is None else run_mlx_probe(model)
    yield examine_python()
    yield examine_processor()
    yield load
    yield from examine_nvidia(probed)
    yield from examine_mlx(probed)
    yield from examine_packages()
    if sys.platform == "linux":
        yield examine_compiler("C++ compiler", ("g++",), "CPUs need it for mx.compile, CUDA for launching graphs")
    yield examine_memory()
    yield examine_disk(settings.models_dir)
    yield from examine_drive_speed(settings.models_dir.expanduser(), model)
    yield from examine_disk_cache(settings)
    yield examine_open_files()
    yield from examine_extras()
    if model is not None:
        yield from examine_model(probed, model)
    if network:
        yield examine_hub(settings)


def _format_findings(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{STATE_MARKS[finding.state]:<8}{finding.name:<{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


REQUIRED_PACKAGES = ("mlx-lm", "transformers", "tokenizers", "safetensors", "gguf", "starlette", "uvicorn")
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")
PROBE_SECONDS = 120
LEAST_DISK = 2 * GIB
LEAST_MEMORY = GIB
LEAST_FILES = 1024
BUSY_LOAD = 0.7  # of the cores


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing`: required but not there; `note`: it works, but could be better; `advice`: what to do about it."""

    name: str
    state: Literal["ok", "note", "missing"]
    detail: str
    advice: str | None = None


def examine_python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def examine_processor() -> Finding:
    cores = counted(os.cpu_count() or 1, "core")
    features = ", ".join(_cpu_features())
    return Finding("processor", "ok", "; ".join(part for part in (device.cpu_name(), cores, features) if part))


def _cpu_features() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return []
    for line in cpuinfo.read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            present = set(line.partition(":")[2].split())
            return [feature for feature in CPU_FEATURES if feature in present]
    return []


def run_mlx_probe(model: Path | None = None) -> dict[str, Any] | str:
    """What `ingot.cli.probe_mlx` printed, or why it failed. `model` is a folder for it to examine as well."""
    command = [sys.executable, "-m", "ingot.cli.probe_mlx", *([] if model is None else [str(model)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"mlx did not respond for {PROBE_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"mlx died with code {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def examine_mlx(probed: dict[str, Any] | str) -> Iterator[Finding]:
    if isinstance(probed, str):
        extra = "" if sys.platform == "darwin" else ", with one of its extras [cpu] and [cuda]"
        yield Finding("mlx", "missing", probed, f"install ingot again{extra}")
        return
    speed = f"{probed['gflops']:.0f} GFLOP/s in float32"
    yield Finding("mlx", "ok", f"{probed['version']} on {probed['kind']} ({probed['name']}), {speed}")
    if probed["kind"] == "cpu" and sys.platform == "linux":
        blas = "OpenBLAS" if probed["fast_blas"] else "mlx's reference BLAS (slow)"
        yield Finding("BLAS", "note" if probed["blas_advice"] else "ok", blas, probed["blas_advice"])
        kernels = probed["native"] or "none: quantised weights are dequantised"
        yield Finding("native kernels", "note" if probed["native_advice"] else "ok", kernels, probed["native_advice"])
    if probed["kind"] != "cpu":
        yield _kernel_finding("paged attention", probed["paged"], "attention gathers pages instead")
        yield _kernel_finding("gated delta", probed["delta"], "mlx-lm's own code runs instead")
    if "compiled" in probed:
        slower = probed["compiled_slower"]
        advice = "install CUDA's compiler (nvidia-cuda-nvrtc) and headers (nvidia-cuda-runtime) alongside mlx"
        yield Finding("kernels", "note" if slower else "ok", slower or probed["compiled"], advice if slower else None)


def examine_model(probed: dict[str, Any] | str, folder: Path) -> Iterator[Finding]:
    if isinstance(probed, str):
        return
    if not (folder / "config.json").is_file():
        yield Finding("model", "note", f"{folder} is not a folder with a config.json", "name the folder of a model")
        return
    for note in probed["slower"]:
        advice = "ingot doctor --measure shows what that costs here"
        yield Finding("model", "note", f"{folder.name}: {note}", advice)
    if not probed["slower"]:
        yield Finding("model", "ok", f"{folder.name}: its attention uses ingot's own modules")


def _kernel_finding(name: str, wrong: str | None, instead: str) -> Finding:
    if wrong is None:
        return Finding(name, "ok", "right")
    return Finding(name, "note", f"not used: {wrong}", f"{instead}, which is slower; please report this to the project")


def _nvidia_driver() -> str | None:
    """Its version, where there is one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def examine_nvidia(probed: dict[str, Any] | str) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("NVIDIA GPU", "note", f"nvidia-smi failed: {error}", "check the driver")
        return
    if done.returncode != 0:
        yield Finding("NVIDIA GPU", "note", "nvidia-smi finds no working GPU", "check the driver")
        return
    unused = isinstance(probed, dict) and probed["kind"] == "cpu"
    advice = "mlx runs on the CPU: install ingot into a fresh environment, with its extra [cuda]"
    detail = "; ".join(done.stdout.strip().splitlines())
    yield Finding("NVIDIA GPU", "note" if unused else "ok", detail, advice if unused else None)


def examine_packages() -> Iterator[Finding]:
    for name in REQUIRED_PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", install_command([name]))


def examine_compiler(name: str, programs: Sequence[str], use: str) -> Finding:
    found = next((path for program in programs if (path := shutil.which(program))), None)
    if found is None:
        return Finding(name, "note", f"none; {use}", "apt-get install g++ (or your system's package)")
    return Finding(name, "ok", found)


def examine_load() -> Finding:
    """Whether the processor is busy with something else."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    detail = f"{load:.1f} on {counted(cores, 'core')} over the last minute"
    if load < BUSY_LOAD * cores:
        return Finding("load", "ok", detail)
    busiest = _busiest_programs()
    others = f", most by {' and '.join(busiest)}" if busiest else ""
    advice = "stop what else runs before you measure anything, or expect less speed meanwhile"
    return Finding("load", "note", detail + others, advice)


def _busiest_programs() -> list[str]:
    """The two that take most of the processor, without this one and the `ps` that it starts."""
    columns = "ppid=,pid=,pcpu=,comm="
    try:
        done = subprocess.run(["ps", "-Ao", columns], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    shares: defaultdict[str, float] = defaultdict(float)
    for row in (line.split(None, 3) for line in done.stdout.splitlines()):
        if len(row) == 4 and str(os.getpid()) not in row[:2]:
            shares[Path(row[3].strip()).name] += float(row[2].replace(",", "."))
    return [
        f"{name} ({share:.0f} %)"
        for name, share in sorted(shares.items(), key=lambda each: -each[1])[:2]
        if share >= 10
    ]


def examine_memory() -> Finding:
    total, available = device.total_memory(), device.available_memory()
    detail = f"{format_bytes(available)} available of {format_bytes(total)}"
    if available < LEAST_MEMORY:
        advice = "close other programs, or name a smaller budget or model: --memory"
        return Finding("memory", "note", detail, advice)
    return Finding("memory", "ok", detail)


def examine_disk(
    folder: Path, name: str = "models folder", flag: str = "--models-dir", least: float = LEAST_DISK
) -> Finding:
    """Whether a folder can be written, and its drive has `least` bytes free."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    detail = f"{format_bytes(free)} free for {folder}"
    if not os.access(there, os.W_OK):
        return Finding(name, "missing", f"{there} cannot be written", f"choose another: {flag}")
    if free < least:
        return Finding(name, "note", detail, f"free some space, or choose another folder: {flag}")
    return Finding(name, "ok", detail)


def examine_drive_speed(models: Path, model: Path | None) -> Iterator[Finding]:
    """That of the drive which a mixture's experts would be read from, where there is a file to read."""
    files = [file for file in (model or models).rglob("*.safetensors") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None:
        return
    in_order, anywhere = read_speed(largest, in_order=True), read_speed(largest)
    if in_order is None or anywhere is None:
        return
    speeds = f"{format_bytes(int(in_order))}/s in order, {format_bytes(int(anywhere))}/s in reads of 1 MiB anywhere"
    yield Finding("drive of models", "ok", f"{speeds} ({largest.name})")


def examine_disk_cache(settings: Settings) -> Iterator[Finding]:
    if (folder := settings.cache_dir) is None:
        return
    yield examine_disk(folder, "disk cache", "--cache-dir", settings.cache_disk_free_gb * 1e9)


def examine_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_format_limit(soft)} (at most {_format_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Finding("open files", "note", detail, f"each client needs one: ulimit -n {LEAST_FILES}")
    return Finding("open files", "ok", detail)


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def examine_extras() -> Iterator[Finding]:
    """What each extra lacks, or has in a version that ingot does not take."""
    for extra, use in EXTRA_USES.items():
        missing, unmet = missing_packages(extra), unmet_requirements(extra)
        if not unmet:
            found = [f"{requirement_name(each)} {installed_version(each)}" for each in EXTRAS[extra].values()]
            yield Finding(extra, "ok", ", ".join(found))
            continue
        without = ", ".join(map(requirement_name, missing))
        wrong = [
            f"{requirement_name(each)} {installed_version(each)} is not {each}" for each in unmet if each not in missing
        ]
        detail = "; ".join([*([f"without {without}"] if missing else []), *wrong, f"for {use}"])
        yield Finding(extra, "note", detail, extras_command(extra))


def examine_hub(settings: Settings) -> Finding:
    if settings.offline:
        return Finding("model hub", "ok", "not checked: offline")
    from huggingface_hub.constants import ENDPOINT as address  # follows the user's own settings for the hub

    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10):
            return Finding("model hub", "ok", f"{address} answers")
    except urllib.error.HTTPError as error:
        return Finding("model hub", "ok", f"{address} answers (HTTP {error.code})")
    except (OSError, ValueError) as error:
        return Finding(
            "model hub", "note", f"{address} cannot be reached: {error}", "check the network, or use --offline"
        )


MEASURE_SECONDS: Final = 120.0
"""For all of it."""
GRACE_S: Final = 15.0
"""For what runs when the time is over: one call of MLX's cannot be broken off."""
POLL_S: Final = 0.1
KERNELS_ONLY: Final = "no model is measured: name one, or `ingot pull` the default model"


class Measurement:
    """What was measured, and what becomes of it."""

    def __init__(self, said: Said, model: str | None, notes: list[str], driver: str | None) -> None:
        self.said, self.model, self.notes, self.driver = said, model, notes, driver
        self.left_out: list[str] = []
        self.trouble: str | None = None
        """Why nothing is remembered."""

    @property
    def wrong(self) -> list[str]:
        """What of ours is wrong here."""
        return [figure.name for figure in self.said.figures.values() if figure.right is False]

    def remember(self) -> None:
        about = self.said.about
        if "device" not in about:
            self.trouble = "the device is not known"
        elif about["emulated"]:
            self.trouble = "an emulated device's times say nothing"
        else:
            try:
                self.left_out = measured.remember(Device(**about["device"]), ratios_by_part(self.said.figures.values()))
            except OSError as error:
                self.trouble = f"{measured.MEASURED_FILE} cannot be written: {error.strerror}"

    def as_json(self) -> dict[str, Any]:
        return {
            **self.said.about,
            "driver": self.driver,
            "model": self.model,
            "figures": [asdict(figure) for figure in self.said.figures.values()],
            "not_measured": self.said.unmeasured,
            "left_out": self.left_out,
            "notes": self._notes(),
        }

    def as_table(self) -> str:
        about = self.said.about
        device = about.get("device", {})
        versions = ", ".join(f"{name} {about[name]}" for name in ("ingot", "mlx", "mlx-lm") if name in about)
        head = f"{device.get('name', 'unknown device')} ({device.get('kind', '?')}); {versions}; {about.get('os', '')}"
        figures = self.said.figures.values()
        width = max([len(figure.name) for figure in figures] or [0])
        title = f"{'':<{width}}  {'right?':<6} {'ours':>16} {'MLX':>16} {'time, ours/MLX':>14}"
        lines = [head if self.driver is None else f"{head}; driver {self.driver}", "", title]
        if about.get("emulated"):
            lines.insert(1, "Kernels are emulated here: whether they are right means something, their times nothing.")
        lines += [_row(figure, width) for figure in figures]
        return "\n".join([*lines, "", *self._notes()])

    def _notes(self) -> list[str]:
        found = [*self.notes]
        if self.said.unmeasured:
            found.append(f"no time for: {', '.join(self.said.unmeasured)}")
        found += [
            f"left out here from now on, as MLX's own is faster: {part} (`ingot doctor --forget-measured` undoes it)"
            for part in self.left_out
        ]
        if self.trouble is not None:
            found.append(f"nothing is remembered: {self.trouble}")
        elif not self.left_out:
            found.append("nothing of ours is clearly slower than MLX's own: nothing is left out")
        return found


def _row(figure: Figure, width: int) -> str:
    right = {True: "right", False: "WRONG", None: ""}[figure.right]
    ours, mlx = (_quantity(value, figure.unit) for value in (figure.ours, figure.mlx))
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    few = f"{figure.turns} of {LEAST_TURNS} turns: decides nothing" if 0 < figure.turns < LEAST_TURNS else None
    said = "; ".join(each for each in (figure.wrong, figure.note, few) if each)
    return f"{figure.name:<{width}}  {right:<6} {ours:>16} {mlx:>16} {ratio:>14}  {said}".rstrip()


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "us":
        return f"{value / 1000:,.2f} ms" if value >= 1000 else f"{value:,.1f} us"
    return f"{value:,.1f} {unit}"


def measure(
    name: str | None, settings: Settings, *, seconds: float = MEASURE_SECONDS, driver: str | None = None
) -> Measurement:
    """Takes about so many seconds. Without a name, the default model is measured, too, if it was pulled."""
    name = name or _pulled_default(settings)
    notes = [KERNELS_ONLY] if name is None else []
    arguments = [str(seconds), *([] if name is None else [name, str(settings.models_dir.expanduser())])]
    said, why = run_child([sys.executable, "-m", "ingot.measure", *arguments], seconds + GRACE_S, _show)
    found = Measurement(said, None if name is None else Path(name).name, [*notes, *([why] if why else [])], driver)
    found.remember()
    return found


def _pulled_default(settings: Settings) -> str | None:
    """The name of the default model, if it is there."""
    default = find_packaged_model(DEFAULT_MODEL)
    if default is None or not is_stored(settings.models_dir.expanduser() / default.name, default.origin):
        return None
    return default.name


def run_child(command: list[str], limit_s: float, show: Callable[[str], None]) -> tuple[Said, str | None]:
    """What a process said, and why it ended early, if it did. It is killed when its time is over, which begins when it
    says what it will measure: before, a model may have to be converted."""
    said, began = Said(), time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    errors: list[str] = []
    readers = [
        threading.Thread(target=_hear_all, args=(child.stdout, said, show), daemon=True),
        threading.Thread(target=errors.extend, args=(child.stderr,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    late = False
    try:
        while child.poll() is None and not late:
            began = began if said.about else time.monotonic()
            late = time.monotonic() - began > limit_s
            time.sleep(POLL_S)
    finally:
        child.kill()
        child.wait()
        for reader in readers:
            reader.join()
    if late:
        return said, f"the time was over during: {said.current}" if said.current else "the time was over"
    if child.returncode != 0:
        last = next((line.strip() for line in reversed(errors) if line.strip()), f"code {child.returncode}")
        return said, f"measuring ended early{f', during {said.current}' if said.current else ''}: {last}"
    return said, None


def _hear_all(lines: Iterable[str], said: Said, show: Callable[[str], None]) -> None:
    for line in lines:
        before = said.current
        figure = said.hear(line)
        if figure is not None:
            show(_row(figure, len(figure.name)))
        elif said.current not in (None, before):
            show(f"{said.current} …")


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def forget_measured() -> str:
    """Forget what was left out, and say so."""
    try:
        there = measured.forget()
    except OSError as error:
        raise IngotError(f"{measured.MEASURED_FILE} cannot be removed: {error.strerror}") from error
    return "what was measured is forgotten: nothing is left out" if there else "nothing was remembered"

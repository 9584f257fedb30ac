"""`python -m ingot.measure SECONDS [MODEL MODELS_DIR]`: measures, and says what it found in lines, which
`ingot.measure.figures` describes.

A process of its own: where the device is lost or a library crashes, what was found before is known all the same.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.kernels.measured import MEASURED_VARIABLE, installed_version
from ingot.measure.figures import line_of
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.kernels.device import Device
    from ingot.measure.subjects import Subject

KERNELS_SHARE = 0.4
"""Of the time, for kernels, where there is a model, too."""
SUBJECT_S = 1.0
"""For the turns of one subject, where there is time."""


def main(arguments: list[str]) -> None:
    os.environ[MEASURED_VARIABLE] = "ignore"  # what was left out before is measured again
    seconds, named = float(arguments[0]), arguments[1:]
    from ingot.kernels import device
    from ingot.kernels.cpu import fastblas

    fastblas.install()  # before mlx, which binds its BLAS when it is loaded
    here = device.current_device()
    model = located(*named) if named else None
    deadline = time.monotonic() + seconds
    say(about=about(here))
    subjects = [*kernel_subjects(here)]
    say(planned=[subject.name for subject in subjects])
    if model is None:
        measure_kernels(subjects, deadline)
        return
    from ingot.measure.model import model_figures, planned_names

    say(planned=planned_names())
    left = measure_kernels(subjects, time.monotonic() + seconds * KERNELS_SHARE)
    for figure in model_figures(model, here, deadline, begin):
        say(figure=figure)
    measure_kernels(left, deadline)


def located(name: str, models_dir: str) -> str:
    """The folder of a model that is on this machine. Raises ModelError."""
    from ingot.config import Settings
    from ingot.models.files.locate import locate_model
    from ingot.models.files.progress import no_progress

    return str(locate_model(name, Settings(models_dir=Path(models_dir), offline=True), no_progress).path)


def kernel_subjects(here: Device) -> Iterator[Subject]:
    """Those that this device uses."""
    if here.kind == "cpu":
        from ingot.measure.native_kernels import native_subjects

        return native_subjects()
    from ingot.measure.gpu_kernels import gpu_subjects

    return gpu_subjects(here)


def measure_kernels(subjects: Iterable[Subject], deadline: float) -> list[Subject]:
    """Returns those that there was no time for."""
    from ingot.measure.subjects import figure_of

    waiting = [*subjects]
    while waiting and (left := deadline - time.monotonic()) > 0:
        subject = waiting.pop(0)
        begin(subject.name)
        say(figure=figure_of(subject, seconds=min(SUBJECT_S, left / (1 + len(waiting)))))
    return waiting


def begin(name: str) -> None:
    say(begun=name)


def say(**what: Any) -> None:
    print(line_of(**what), flush=True)


def about(here: Device) -> dict[str, Any]:
    from ingot.kernels.device import cpu_name
    from ingot.kernels.gpu.emulator import Emulator
    from ingot.kernels.gpu.launcher import kernel_launcher

    return {
        "device": asdict(here),
        "emulated": isinstance(kernel_launcher(here), Emulator),
        "ingot": __version__,
        **{name: installed_version(name) for name in ("mlx", "mlx-lm")},
        "chip": cpu_name(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])

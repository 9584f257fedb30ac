"""`ingot doctor --measure`: starts the process that measures, shows its progress, remembers what is slower here."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ingot.config import DEFAULT_MODEL, Settings
from ingot.errors import IngotError
from ingot.kernels import measured
from ingot.kernels.device import Device
from ingot.measure.figures import LEAST_TURNS, Figure, Said, ratios_by_part
from ingot.models.files.model_store import is_stored
from ingot.models.files.packaged import find_packaged_model

SECONDS: Final = 120.0
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
    name: str | None, settings: Settings, *, seconds: float = SECONDS, driver: str | None = None
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

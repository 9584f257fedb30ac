from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.cli import doctor
from ingot.config import Settings
from ingot.kernels import measured
from ingot.kernels.device import Device
from ingot.kernels.measured import slower_parts
from ingot.measure.figures import Figure, Said, line_of
from tests.cli.scripted import environment
from tests.cli.test_doctor import WORKING

MAC = {"kind": "metal", "name": "Apple M9", "memory": 1}
ABOUT = {"device": MAC, "emulated": False, "ingot": "0.1", "mlx": "1.0", "mlx-lm": "2.0", "os": "an OS"}
SLOWER = Figure("sampling, 8 rows", "kernels", "sampling", True, None, 0.01, 20.0, 10.0, ratio=2.0, turns=7)
FASTER = Figure("native norm", "kernels", "native norms", True, None, 0.0, 10.0, 2500.0, ratio=0.004, turns=7)
SPEED = Figure("decode, 1 stream", "model", ours=90.0, mlx=30.0, unit="tokens/s", ratio=0.33, turns=5)
WRONG = Figure("a kernel", "kernels", "a part", False, "differs by 3")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "measured.json"
    monkeypatch.setattr(measured, "MEASURED_FILE", found)
    monkeypatch.delenv(measured.MEASURED_VARIABLE, raising=False)
    return found


def script(*lines: str, then: str = "") -> list[str]:
    """A process that says these lines."""
    return [sys.executable, "-c", f"print({chr(10).join(lines)!r}, flush=True)\n{then}"]


def heard(*figures: Figure, about: dict[str, Any] = ABOUT, planned: tuple[str, ...] = ()) -> Said:
    said = Said()
    for line in (line_of(about=about), line_of(planned=list(planned)), *(line_of(figure=each) for each in figures)):
        said.hear(line)
    return said


def measurement(*figures: Figure, about: dict[str, Any] = ABOUT, planned: tuple[str, ...] = ()) -> doctor.Measurement:
    found = doctor.Measurement(heard(*figures, about=about, planned=planned), "a-model", [], "580.1")
    found.remember()
    return found


def test_what_is_slower_is_remembered_and_what_to_do_about_it_is_said() -> None:
    found = measurement(SLOWER, FASTER, SPEED)
    assert found.left_out == ["sampling"]
    assert slower_parts(Device(**MAC)).leave_out("sampling")
    assert "sampling (`ingot doctor --forget-measured` undoes it)" in found.as_table()


def test_the_table_has_a_line_for_each_figure_and_the_versions() -> None:
    lines = measurement(SLOWER, FASTER, SPEED, WRONG).as_table().splitlines()
    assert "Apple M9 (metal); ingot 0.1, mlx 1.0, mlx-lm 2.0; an OS; driver 580.1" in lines[0]
    [sampling], [norm], [speed], [wrong] = (
        [line.split() for line in lines if line.startswith(name)]
        for name in ("sampling, 8 rows", "native norm", "decode, 1 stream", "a kernel")
    )
    assert sampling[3:] == ["right", "20.0", "us", "10.0", "us", "2.00"]
    assert norm[2:] == ["right", "10.0", "us", "2.50", "ms", "0.00"]
    assert speed[3:] == ["90.0", "tokens/s", "30.0", "tokens/s", "0.33"]
    assert wrong[2:] == ["WRONG", "differs", "by", "3"]


def test_what_there_was_no_time_for_is_named() -> None:
    found = measurement(SLOWER, planned=(SLOWER.name, "LoRA", "experts"))
    assert found.as_json()["not_measured"] == ["LoRA", "experts"]
    assert "no time for: LoRA, experts" in found.as_table()


def test_a_disturbed_turn_or_two_decide_nothing() -> None:
    few = Figure("sampling, 8 rows", "kernels", "sampling", True, ours=20.0, mlx=10.0, ratio=2.0, turns=2)
    found = measurement(few)
    assert found.left_out == [] and "decides nothing" in found.as_table()


@pytest.mark.parametrize("about", [{**ABOUT, "emulated": True}, {}])
def test_nothing_is_remembered_of_emulated_kernels_or_an_unknown_device(about: dict[str, Any], file: Path) -> None:
    found = measurement(SLOWER, about=about)
    assert not file.exists() and "nothing is remembered" in found.as_table()


def test_a_file_that_cannot_be_written_is_said(file: Path) -> None:
    file.mkdir()
    (file / "something").touch()
    assert "cannot be written" in measurement(SLOWER).as_table()


def test_the_process_is_heard_line_by_line() -> None:
    shown: list[str] = []
    lines = (line_of(about=ABOUT), line_of(begun=SLOWER.name), line_of(figure=SLOWER))
    said, why = doctor.run_child(script("a library", *lines), 60, shown.append)
    assert why is None and said.figures == {SLOWER.name: SLOWER} and said.about == ABOUT
    assert shown[0] == "sampling, 8 rows …" and "right" in shown[1]


def test_what_was_measured_before_a_crash_is_kept_and_what_crashed_is_said() -> None:
    lines = (line_of(planned=[SLOWER.name, "LoRA"]), line_of(figure=SLOWER), line_of(begun="LoRA"))
    crash = "import sys; sys.stderr.write('an illegal memory access\\n'); sys.exit(3)"
    said, why = doctor.run_child(script(*lines, then=crash), 60, lambda line: None)
    assert said.unmeasured == ["LoRA"] and SLOWER.name in said.figures
    assert why == "measuring ended early, during LoRA: an illegal memory access"


def test_a_process_that_takes_too_long_is_killed_and_said() -> None:
    lines = (line_of(about=ABOUT), line_of(figure=SLOWER), line_of(begun="LoRA"))
    said, why = doctor.run_child(script(*lines, then="import time; time.sleep(600)"), 0.2, lambda line: None)
    assert SLOWER.name in said.figures and why == "the time was over during: LoRA"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have measured."""
    commands: list[list[str]] = []

    def run_child(command: list[str], *_: Any) -> tuple[Said, None]:
        commands.append(command)
        return heard(SLOWER, SPEED), None

    monkeypatch.setattr(doctor, "run_child", run_child)
    monkeypatch.setattr(doctor, "run_mlx_probe", lambda *_: {**WORKING, "slower": []})
    return commands


def test_the_report_has_what_was_found_and_what_was_measured_as_json(
    measuring: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert doctor.run_doctor(["some-model", "--measure", "--json", "--models-dir", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {finding["name"] for finding in report["findings"]} >= {"Python", "mlx"}
    found = report["measured"]
    assert found["figures"][0]["name"] == SLOWER.name and found["left_out"] == ["sampling"]
    assert {"ingot", "mlx", "mlx-lm", "os", "device", "driver"} <= found.keys() and found["model"] == "some-model"
    [command] = measuring
    assert command[-2:] == ["some-model", str(tmp_path)]


def test_without_a_model_kernels_alone_are_measured_and_that_is_said(
    measuring: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    doctor.run_doctor(["--measure", "--models-dir", str(tmp_path)])
    assert doctor.KERNELS_ONLY in capsys.readouterr().out
    assert measuring[0][-1] == str(doctor.MEASURE_SECONDS)


def test_the_default_model_is_measured_if_it_was_pulled(
    measuring: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "is_stored", lambda *_: True)
    found = doctor.measure(None, Settings(models_dir=tmp_path))
    assert measuring[0][-2:] == ["smollm2-135m", str(tmp_path)] and found.notes == []


def test_a_wrong_kernel_fails_the_command(measuring: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_child", lambda *_: (heard(WRONG), None))
    assert doctor.run_doctor(["--measure"]) == 1


def test_without_the_flag_nothing_is_measured(measuring: list[list[str]]) -> None:
    doctor.run_doctor([])
    assert measuring == []


def test_what_was_measured_can_be_forgotten(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    measurement(SLOWER)
    assert doctor.run_doctor(["--forget-measured"]) == 0
    assert not file.exists() and "is forgotten" in capsys.readouterr().err
    assert doctor.run_doctor(["--forget-measured"]) == 0
    assert "nothing was remembered" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are emulated with g++")
def test_the_process_that_measures_names_all_kernels_and_ends_when_its_time_is_over(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ingot.measure", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**environment(tmp_path), "INGOT_AS": "cuda"},
        check=True,
    )
    said = Said()
    for line in done.stdout.splitlines():
        said.hear(line)
    assert said.about["emulated"] and said.figures and said.unmeasured
    assert all(figure.right for figure in said.figures.values())

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot import extras
from ingot.cli import doctor
from ingot.config import Settings
from tests.cli.scripted import environment
from tests.processes import INGOT

WORKING = {
    "version": "1.0",
    "kind": "cpu",
    "name": "a processor",
    "memory": 1,
    "gflops": 2.0,
    "fast_blas": False,
    "blas_advice": "install gcc",
    "native": None,
    "native_advice": "install g++",
}


def names(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


def test_the_command_reports_this_machine_as_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [INGOT, "doctor", "--json"], capture_output=True, text=True, timeout=120, env=environment(tmp_path)
    )
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (done.returncode, report["ok"]) == (0, True)
    assert "GFLOP/s" in found["mlx"]["detail"]
    assert {"Python", "processor", "memory", "models folder", "open files", "mlx-lm"} <= found.keys()
    assert "model hub" not in found


def test_an_mlx_that_cannot_be_loaded_is_missing_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "run_mlx_probe", lambda: "ImportError: no libmlx.so")
    assert doctor.run_doctor([]) == 1
    shown = capsys.readouterr().out
    assert "MISSING mlx" in shown
    assert "ImportError: no libmlx.so" in shown
    assert "-> install ingot again" in shown


def test_a_slow_blas_is_a_note_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    blas = names(list(doctor.examine_mlx(WORKING)))["BLAS"]
    assert (blas.state, blas.advice) == ("note", "install gcc")


def test_kernels_that_are_not_right_are_a_note_with_what_that_means() -> None:
    gpu = {**WORKING, "kind": "cuda", "paged": None, "delta": None}
    for key, name in (("paged", "paged attention"), ("delta", "gated delta")):
        right, wrong = (names(list(doctor.examine_mlx({**gpu, key: found})))[name] for found in (None, "write differs"))
        assert (right.state, right.advice) == ("ok", None)
        assert wrong.state == "note" and "write differs" in wrong.detail and wrong.advice is not None
        assert name not in names(list(doctor.examine_mlx(WORKING)))


def test_what_was_compiled_is_said_and_what_mlx_compiles_instead_is_a_note() -> None:
    gpu = {**WORKING, "kind": "cuda", "paged": None, "delta": None, "compiled": "4 compiled, in 1.0 s"}
    compiled, noted = (
        names(list(doctor.examine_mlx({**gpu, "compiled_slower": slower})))["kernels"]
        for slower in (None, "MLX compiles kernels: all (no NVRTC)")
    )
    assert (compiled.state, compiled.detail, compiled.advice) == ("ok", "4 compiled, in 1.0 s", None)
    assert noted.state == "note" and "no NVRTC" in noted.detail and "nvidia-cuda-nvrtc" in str(noted.advice)
    assert "kernels" not in names(list(doctor.examine_mlx(WORKING)))


def test_a_process_that_acts_as_a_gpu_looks_at_its_kernels(tmp_path: Path) -> None:
    done = subprocess.run(
        [INGOT, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(tmp_path), "INGOT_AS": "cuda"},
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["paged attention"]["detail"].startswith("right" if shutil.which("g++") else "not used: no kernels")


def test_an_nvidia_gpu_that_mlx_does_not_use_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H200, 143771 MiB, 580.65.06'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (unused,) = doctor.examine_nvidia(WORKING)
    (used,) = doctor.examine_nvidia(WORKING | {"kind": "cuda"})
    assert (unused.state, used.state) == ("note", "ok")
    assert "H200" in used.detail and "its extra [cuda]" in str(unused.advice)


def test_a_missing_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.examine_compiler("C compiler", ("cc",), "for speed").state == "note"


def test_the_models_folder_need_not_exist_yet(tmp_path: Path) -> None:
    assert doctor.examine_disk(tmp_path / "a" / "b").state == "ok"


def test_how_fast_the_drive_of_the_models_is_is_said_where_there_is_one_to_read(tmp_path: Path) -> None:
    assert list(doctor.examine_drive_speed(tmp_path, None)) == []
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "model.safetensors").write_bytes(bytes(9 << 20))
    [found] = doctor.examine_drive_speed(tmp_path, None)
    assert found.state == "ok" and "/s in order" in found.detail and "model.safetensors" in found.detail


def test_a_folder_on_a_drive_without_room_is_noted_with_its_flag(tmp_path: Path) -> None:
    short = doctor.examine_disk(tmp_path, "models folder", "--models-dir", least=1e18)
    assert short.state == "note" and "--models-dir" in str(short.advice)
    assert list(doctor.examine_disk_cache(Settings())) == []
    [room] = doctor.examine_disk_cache(Settings(cache_dir=tmp_path, cache_disk_free_gb=0.0))
    [none] = doctor.examine_disk_cache(Settings(cache_dir=tmp_path, cache_disk_free_gb=1e6))
    assert (room.name, room.state, none.state) == ("disk cache", "ok", "note") and "--cache-dir" in str(none.advice)


def test_a_busy_machine_is_noted_with_what_keeps_it_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    listing = "1 2 3.0 idle\n1 3 90.5 /usr/bin/my compiler\n1 4 40,0 other\n1 5 7.0 /usr/bin/my compiler\n"
    listing += f"1 {own} 99.0 ingot\n{own} 7 100.0 ps\n"
    done = subprocess.CompletedProcess([], 0, listing, "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    for load, state in ((0.5, "ok"), (2.7, "ok"), (2.9, "note"), (16.0, "note")):
        monkeypatch.setattr(doctor.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        finding = doctor.examine_load()
        assert finding.state == state and bool(finding.advice) == (state == "note")
    assert finding.detail == "16.0 on 4 cores over the last minute, most by my compiler (98 %) and other (40 %)"


def test_an_extra_is_noted_where_a_package_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {
        "mlx-vlm": "0.6.3",
        "pillow": "12.0",
        "av": "15.0.1rc1",
        "pypdfium2": "5.0",
        "mcp": "2.3",
        "pyzmq": None,
    }
    monkeypatch.setattr(extras, "_is_installed", lambda module: module != "zmq")
    for module in (doctor, extras):
        monkeypatch.setattr(
            module, "installed_version", lambda each: versions.get(extras.requirement_name(each), "9999")
        )
    found = names(list(doctor.examine_extras()))
    assert found["vision"].detail == "mlx-vlm 0.6.3 is not mlx-vlm>=0.7.10,<0.8; for vision models"
    assert str(found["vision"].advice).endswith("extras add vision")
    assert (found["audio"].state, found["mcp"].detail) == ("ok", "mcp 2.3")
    assert found["events"].detail == "without pyzmq; for `--kv-events`"
    assert str(found["events"].advice).endswith("extras add events")
    assert found["bench"].state == "note"  # a version that is too new


def test_little_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.device, "available_memory", lambda: 500_000_000)
    finding = doctor.examine_memory()
    assert finding.state == "note" and finding.detail.startswith("500 MB available of") and finding.advice


def test_the_hub_is_not_asked_when_offline() -> None:
    assert doctor.examine_hub(Settings(offline=True)).detail == "not checked: offline"


@pytest.mark.parametrize(("code", "output"), [(1, "boom\nImportError: x"), (-9, "")])
def test_a_probe_that_dies_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch, code: int, output: str) -> None:
    def died(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, "", output)

    monkeypatch.setattr(doctor.subprocess, "run", died)
    assert doctor.run_mlx_probe() == (output.splitlines() or ["mlx died with code -9"])[-1]


def test_it_says_of_a_model_whether_its_attention_is_mlx_lms_own(tmp_path: Path) -> None:
    import mlx.core as mx

    from ingot.models.layers.modules import named_parameters
    from ingot.models.report import model_notes_before_loading
    from tests.models.layers import family_configs

    for family in ("llama", "afm7"):
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(family_configs.config(family)))
        mx.save_safetensors(str(folder / "model.safetensors"), dict(named_parameters(family_configs.build(family))))
    assert model_notes_before_loading(tmp_path / "llama") == []
    notes = model_notes_before_loading(tmp_path / "afm7")
    probed = {**WORKING, "slower": notes}
    [finding] = doctor.examine_model(probed, tmp_path / "afm7")
    assert finding.state == "note" and "afm7: attention by the family's own modules" in finding.detail
    [finding] = doctor.examine_model({**WORKING, "slower": []}, tmp_path / "llama")
    assert finding.state == "ok"
    [finding] = doctor.examine_model(probed, tmp_path / "none")
    assert (finding.state, finding.advice) == ("note", "name the folder of a model")

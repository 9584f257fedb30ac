"""The soak: what it takes for growth and for trouble, and a short one against a real server."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import wave
from pathlib import Path

import pytest

from bench.soak.__main__ import GROWTH, allowed, growth, main
from bench.soak.acts import ACTS
from bench.soak.further_acts import FURTHER, acts_with, hum
from bench.soak.report import Report
from bench.soak.tables import write_lora, write_tables
from bench.soak.trend import WARM, trend
from bench.soak.watch import Sight, complaints, figures, make_scratch, resident_children
from ingot.config import load_config, memory_bytes, model_entries
from ingot.models.lora.weights import read_lora
from ingot.protocol.ingot_api.metrics import generating_model_metrics, render_metrics
from tests.http.scripted import ScriptedEngine

FOLDERS = Path(__file__).parents[2] / "foundry" / "models"


def test_what_fills_up_first_and_stays_is_no_growth() -> None:
    values = [100.0, 200.0, 300.0, 400.0, *[400.0, 404.0, 399.0] * 5]
    assert abs(trend([float(at) for at in range(len(values))], values).share) < 0.01


def test_what_grows_a_little_at_each_look_is_growth_whatever_peaks_there_are() -> None:
    values = [1000 + 3.0 * at + (5000 if at == 20 else 0) for at in range(60)]
    found = trend([float(at) for at in range(60)], values)
    assert found.growth == pytest.approx(3.0 * 59 * (1 - WARM), rel=0.02)


def test_lines_that_no_healthy_server_writes_are_found_in_its_log() -> None:
    log = "2026 INFO ingot: ready\n2026 ERROR ingot.engine: it failed\nTraceback (most recent call last):\n  x\n"
    assert complaints(log) == ["2026 ERROR ingot.engine: it failed", "Traceback (most recent call last):"]
    assert complaints("2026 WARNING ingot.http: settings were read again; changed: nothing\n") == []


def test_figures_are_found_by_the_names_that_the_soak_asks_for() -> None:
    engine = ScriptedEngine()
    told = figures(
        render_metrics(
            [generating_model_metrics(engine.card, engine.health(), engine.figures, engine.speculation)], {200: 1}
        )
    )
    assert told["vllm:kv_cache_usage_perc"] == [0.25]
    assert {'ingot_memory_bytes{part="active"}', 'ingot_memory_bytes{part="states_held"}'} <= told.keys()
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting"} <= told.keys()


def test_a_short_soak_may_grow_by_more_than_one_of_half_an_hour() -> None:
    assert allowed(60) == allowed(30) == GROWTH
    assert allowed(3) == pytest.approx(10 * GROWTH)


def test_only_models_that_are_there_are_asked() -> None:
    assert {act.__name__ for act in acts_with(["stays", "rerank"])} - {act.__name__ for act in ACTS} == {
        *("adapted", "reranked")
    }
    assert len(acts_with(["stays", "hybrid", "rerank", "vectors", "ears"])) == len(ACTS) + len(FURTHER)


def test_tables_of_a_soak_are_settings_of_a_server_and_two_of_their_models_exclude_each_other(tmp_path: Path) -> None:
    file = write_tables(FOLDERS / "dense", tmp_path)
    settings = load_config({}, {}, file).settings
    entries = {entry.name: memory_bytes(entry.settings.memory or "0", 1 << 40) for entry in model_entries(settings)}
    room = memory_bytes(settings.memory or "0", 1 << 40)
    assert room < sum(entries.values()) <= room + entries["window"]


def test_the_adapter_of_a_soak_is_one_for_its_model(tmp_path: Path) -> None:
    weights = read_lora(write_lora(FOLDERS / "dense", tmp_path / "tuned"))
    assert weights.rank == 8 and all(path.endswith(("q_proj", "v_proj")) for path in weights.pairs)


def test_a_hum_is_as_long_as_it_should_be() -> None:
    with wave.open(io.BytesIO(hum(0.5))) as sound:
        assert sound.getnframes() == sound.getframerate() // 2


def sights(*, leak: int = 0, threads: int = 0, temporary: int = 0) -> list[Sight]:
    """Of half an hour, with so much more at each."""
    return [
        Sight(
            at=float(at),
            resident=400_000_000 + at * leak,
            children=100_000_000,
            active=1e8,
            held=1e7,
            device=0,
            files=30,
            threads=30 + at * threads,
            temporary=at * temporary,
            running=2.0,
        )
        for at in range(60)
    ]


def grown(seen: list[Sight]) -> set[str]:
    return {line.partition(":")[0] for line, grew in growth([seen[30], seen[-1]], 30.0) if grew}


def test_memory_threads_and_temporary_files_that_grow_throughout_are_wrong_and_what_stays_is_not() -> None:
    assert grown(sights()) == set()
    assert grown(sights(leak=1_000_000)) == {
        "resident memory at rest",
        "resident memory with child processes at rest",
    }
    assert grown(sights(threads=1)) == {"threads at rest"}
    assert grown(sights(temporary=1)) == {"temporary files at rest"}


def report(*wrong: str) -> Report:
    seen = sights(leak=1_000_000)
    return Report("A soak", ["resident memory: more"], wrong, seen, [sight.at for sight in seen], "minutes")


def test_a_report_has_words_figures_and_plots_and_its_exit_status_is_the_verdict(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report().publish(tmp_path) == 0
    assert "nothing is wrong" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "memory.svg").read_text()
    assert len(json.loads((tmp_path / "samples.json").read_text())["samples"]) == 60
    assert report("it grew").publish(tmp_path) == 1
    assert "- WRONG: it grew" in (tmp_path / "report.md").read_text()


def test_a_report_without_matplotlib_says_how_to_install_it_and_keeps_no_older_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.png").write_bytes(b"of an earlier soak")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report("it grew").publish(tmp_path) == 1
    assert "extras add bench" in (text := (tmp_path / "report.md").read_text()) and "matplotlib" in text
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "samples.json"}


def test_the_memory_of_child_processes_is_that_of_their_children_too() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        below = resident_children(parent.pid)
        assert 0 < below < resident_children(os.getpid())
        parent.communicate(b"\n")


def test_kernels_that_mlx_keeps_are_no_temporary_files_of_a_server(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path)
    assert [each.name for each in scratch.iterdir() if not each.is_symlink()] == []
    assert (scratch / "mlx").is_dir()


def test_a_soak_of_seconds_writes_a_report_with_its_verdict_and_a_plot(tmp_path: Path) -> None:
    assert main(["--minutes", "0.2", "--report", str(tmp_path)]) == 0
    assert "nothing is wrong" in (tmp_path / "report.md").read_text()
    assert {file.name for file in tmp_path.iterdir()} >= {"report.md", "samples.json", "memory.png", "memory.svg"}

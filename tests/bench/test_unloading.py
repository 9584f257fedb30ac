"""Cycles of loads and unloads: which models they take, what is growth in them, and a few against a real server."""

from __future__ import annotations

import json
from pathlib import Path

from bench.soak.watch import Sight
from bench.unloading import growth, main, usual, write_model
from ingot.config.settings import DEFAULT_MODEL


def test_a_shape_is_written_once_and_a_folder_or_a_packaged_model_is_taken_as_it_is(tmp_path: Path) -> None:
    first = Path(write_model(tmp_path, "llama-15m"))
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert write_model(tmp_path, "llama-15m") == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert write_model(tmp_path, str(first)) == str(first)
    assert write_model(tmp_path, DEFAULT_MODEL) == DEFAULT_MODEL


def test_what_grows_slowly_is_seen_between_the_tenth_behind_the_warm_up_and_the_last() -> None:
    assert usual([0] * 25 + [1000 + step for step in range(75)]) == (1003, 1071)


def test_a_single_high_sample_at_either_end_is_no_growth() -> None:
    warm, flat = [0] * 25, [1000] * 75
    assert usual([*warm, 2000, *flat[1:]]) == usual([*warm, *flat[1:], 2000]) == (1000, 1000)


def test_few_samples_are_compared_one_with_one() -> None:
    assert usual([5]) == (5, 5) and usual([0, 5, 6, 7]) == (5, 7)


def cycles(
    count: int, *, resident: int = 0, children: int = 0, files: int = 0, threads: int = 0, temporary: int = 0
) -> list[Sight]:
    """With so much more in each."""
    return [
        Sight(
            at=float(at),
            resident=120_000_000 + at * resident,
            children=10_000_000 + at * children,
            active=0.0,
            held=0.0,
            device=0,
            files=7 + at * files,
            threads=16 + at * threads,
            temporary=at * temporary,
            running=0.0,
        )
        for at in range(count)
    ]


def grown(seen: list[Sight], *active: float) -> list[str]:
    return [line.partition(":")[0] for line, grew in growth(seen, {"m": list(active)}) if grew]


def test_what_becomes_more_in_each_cycle_is_wrong_and_what_stays_is_not() -> None:
    assert grown(cycles(100), *[1e8] * 100) == []
    assert grown(cycles(100, resident=50_000)) == ["resident memory", "resident memory with child processes"]
    assert grown(cycles(100, children=50_000)) == ["resident memory with child processes"]
    assert grown(cycles(100), *(1e8 + 1e5 * at for at in range(100))) == ["MLX's memory with m"]
    assert grown(cycles(100, threads=1)) == ["threads"]
    assert grown(cycles(100, files=1)) == ["open files"]
    assert grown(cycles(100, temporary=1)) == ["temporary files"]


def test_fewer_cycles_may_grow_by_more_in_proportion() -> None:
    assert grown(cycles(20, resident=500_000)) == []
    assert grown(cycles(20, resident=1_500_000)) == ["resident memory", "resident memory with child processes"]


def test_a_server_that_loads_and_unloads_models_over_http_is_reported_with_a_verdict_and_a_plot(tmp_path: Path) -> None:
    assert main(["--cycles", "3", "--models", "dispatch,llama-5m", "--report", str(tmp_path)]) == 0
    assert "nothing is wrong" in (tmp_path / "report.md").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "samples.json", "memory.png", "memory.svg"}
    found = json.loads((tmp_path / "samples.json").read_text())
    assert len(found["samples"]) == len(found["MLX's memory with dispatch"]) == 3
    assert all(sample["resident"] > 1e7 for sample in found["samples"]) and min(found["MLX's memory with llama-5m"]) > 0


def test_a_load_that_fails_is_wrong_and_is_reported(tmp_path: Path) -> None:
    model = Path(write_model(tmp_path, "dispatch"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert main(["--cycles", "3", "--models", str(model), "--report", str(tmp_path / "report")]) == 1
    assert "WRONG: after 0 cycles: /v1/models/dispatch/load answered 5" in (tmp_path / "report/report.md").read_text()

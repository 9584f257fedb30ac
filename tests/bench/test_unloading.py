"""Which models the benchmark of loads and unloads takes."""

from __future__ import annotations

from pathlib import Path

from bench.unloading import written


def test_a_shape_is_written_once_and_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    first = written(tmp_path, "llama-15m")
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert written(tmp_path, "llama-15m") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert written(tmp_path, str(first)) == first

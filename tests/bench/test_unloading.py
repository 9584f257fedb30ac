"""Which models the benchmark of loads and unloads takes, and what it calls growth."""

from __future__ import annotations

from pathlib import Path

from bench.unloading import growth, written


def test_a_shape_is_written_once_and_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    first = written(tmp_path, "llama-15m")
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert written(tmp_path, "llama-15m") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert written(tmp_path, str(first)) == first


def test_what_grows_slowly_is_seen_between_the_first_and_the_last_tenth() -> None:
    assert growth([1000 + step for step in range(100)]) == (1004.5, 1094.5)


def test_a_single_high_sample_at_either_end_is_no_growth() -> None:
    flat = [1000] * 100
    assert growth([2000, *flat[1:]]) == growth([*flat[1:], 2000]) == (1000, 1000)


def test_few_samples_are_compared_one_with_one() -> None:
    assert growth([5]) == (5, 5) and growth([5, 6, 7]) == (5, 7)

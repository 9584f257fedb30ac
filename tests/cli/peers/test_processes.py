from __future__ import annotations

import os

import pytest

from bench.servers import environment, ready_url


def test_the_address_is_taken_from_the_ready_line() -> None:
    said = "loading x\nready: http://127.0.0.1:4711 | x (float32) | cpu\ntry: curl http://127.0.0.1:4711/v1\n"
    assert ready_url(said) == "http://127.0.0.1:4711"
    assert ready_url("loading x\nnot ready: soon") is None


def test_settings_of_the_user_do_not_reach_the_servers_but_the_number_of_threads_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INGOT_MAX_SEQUENCES", "1")
    monkeypatch.setenv("INGOT_CONFIG", "mine.toml")
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    monkeypatch.setenv("INGOT_THREADS", "2")
    found = environment()
    assert "INGOT_MAX_SEQUENCES" not in found
    assert found["INGOT_CONFIG"] == os.devnull
    assert "INGOT_KERNELS" not in found
    assert found["INGOT_THREADS"] == "2"
    assert found["PATH"] == os.environ["PATH"]

"""Commands that meet what ingot did not make, or lack what they need: they say so, and change nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ingot.cli.main import main

THEIRS = "[Unit]\nDescription=somebody else's\n"


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a unit would be, on a machine on which systemd has no session of this user's."""
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    path = tmp_path / ".config/systemd/user/mine.service"
    path.parent.mkdir(parents=True)
    return path


def test_a_unit_that_ingot_did_not_write_is_neither_overwritten_nor_removed(
    unit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit.write_text(THEIRS)
    assert main(["service", "uninstall", "--name", "mine"]) != 0
    assert f"ingot did not write {unit}, so it is left alone" in capsys.readouterr().err
    assert main(["service", "install", "--name", "mine"]) != 0
    assert "is different; ingot did not write it" in capsys.readouterr().err
    assert unit.read_text() == THEIRS


def test_without_a_user_bus_an_install_leaves_no_file_and_an_uninstall_removes_the_one_there_is(
    unit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", "--name", "mine"]) != 0
    said = capsys.readouterr().err
    assert "Failed to connect to bus" in said and "enable-linger" in said and not unit.exists()
    assert main(["service", "show", "--name", "mine"]) == 0
    unit.write_text(capsys.readouterr().out)
    enabled = unit.parent / "default.target.wants" / unit.name
    enabled.parent.mkdir()
    enabled.symlink_to(unit)
    assert main(["service", "uninstall", "--name", "mine"]) == 0
    assert "could not be stopped" in capsys.readouterr().err
    assert not unit.exists() and not enabled.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "module", "said", "extra"),
    [
        (["--audio-model", "whisper-tiny.en"], "av", "--audio-model needs av", "audio"),
        (["--lazy", "--audio-model", "whisper-tiny.en"], "av", "--audio-model needs av", "audio"),
        (["whisper-tiny.en"], "av", "whisper-tiny.en, of kind audio, needs av", "audio"),
        (["qwen3.5-9b"], "mlx_vlm", "qwen3.5-9b, which sees, needs mlx-vlm", "vision"),
        (["--kv-events", "tcp://127.0.0.1:*"], "zmq", "--kv-events needs pyzmq", "events"),
        (["--mcp-config", "/mcp.json"], "mcp", "MCP needs mcp", "mcp"),
        (
            ["--otlp-traces-endpoint", "http://127.0.0.1:4318"],
            *("opentelemetry.sdk", "--otlp-traces-endpoint needs opentelemetry-sdk", "otel"),
        ),
    ],
)
def test_a_server_that_lacks_an_extra_does_not_start_and_says_the_command_for_this_environment(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    module: str,
    said: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["serve", *arguments]) != 0
    heard = capsys.readouterr().err
    assert said in heard and f"{Path(sys.executable).parent / 'ingot'} extras add {extra}`" in heard


@pytest.mark.parametrize("module", ["mlx_vlm", "PIL", "av", "pypdfium2"])
def test_a_model_that_sees_is_refused_at_the_start_also_where_it_is_loaded_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, module: str
) -> None:
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["serve", str(tmp_path), "--lazy"]) != 0
    heard = capsys.readouterr().err
    assert "which sees, needs " in heard and ", or serve it for text alone with --text-only" in heard

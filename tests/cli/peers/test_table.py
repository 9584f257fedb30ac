from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.peers import table
from ingot.cli.peers.processes import Placement, Server, fill
from ingot.cli.peers.table import INGOT, PEER_NAMES, PEERS, Peer, find_peer, read_version
from ingot.errors import ConfigError
from ingot.models.files.progress import no_progress


def placed(peer: Peer, folder: Path, *flags: str) -> Server:
    placement = Placement(folder / "weights" / "m", "m", 16, 4096, folder / "scratch", flags)
    return Server(peer, Path("/opt") / peer.program, placement)


@pytest.mark.parametrize("peer", [INGOT, *PEERS], ids=lambda peer: peer.name)
def test_every_word_in_braces_of_a_command_is_filled_in(peer: Peer, tmp_path: Path) -> None:
    server = placed(peer, tmp_path, "--more")
    words = [*server.command, server.model, *server.environment.values()]
    assert not [word for word in words if "{" in word]
    assert server.command[-1] == "--more"
    port = str(server.client.port)
    assert any(port in word for word in words), "it has to listen where it is asked"


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_can_be_installed_or_says_where_to_get_it(peer: Peer) -> None:
    assert table.can_install(peer) or peer.get
    assert peer.ready.startswith("/") and peer.health.startswith("/") and peer.weights


@pytest.mark.parametrize("peer", [INGOT, *PEERS], ids=lambda peer: peer.name)
def test_a_command_is_shown_without_folders_and_ports_that_are_others_tomorrow(peer: Peer, tmp_path: Path) -> None:
    server = placed(peer, tmp_path, "--more")
    shown = server.shown
    assert str(tmp_path) not in shown and str(server.client.port) not in shown
    assert "PORT" in shown and shown.endswith(" --more")


def test_our_own_command_is_shown_as_people_type_it(tmp_path: Path) -> None:
    shown = placed(INGOT, tmp_path).shown
    assert shown.startswith("ingot serve m ") and "--cache-dir CACHE" in shown


def test_a_peer_is_found_in_its_own_environment_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = find_peer("vllm-mlx")
    monkeypatch.setattr(table, "PEERS_FOLDER", tmp_path / "peers")
    on_path, own = tmp_path / "bin", tmp_path / "peers" / peer.name / "bin"
    for folder in (on_path, own):
        folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(on_path))
    assert table.find_program(peer) is None
    for folder in (on_path, own):
        (folder / peer.program).write_text("#!/bin/sh\n")
        (folder / peer.program).chmod(0o755)
        assert table.find_program(peer) == folder / peer.program


def test_one_that_is_on_no_index_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="brew install omlx"):
        table.install(find_peer("omlx"), no_progress)
    monkeypatch.setattr(sys, "platform", "linux")
    assert table.absence(find_peer("omlx")) == "runs on macOS alone"
    assert "ollama.com" in table.absence(find_peer("ollama"))
    assert "--install" in table.absence(find_peer("llama-server"))


@pytest.mark.parametrize("broken", [True, False])
def test_an_installed_package_that_transformers_would_fail_with_is_removed_from_a_peers_environment(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, int(broken and command[-1] == "import torchvision"), "", "")

    monkeypatch.setattr(table, "PEERS_FOLDER", tmp_path / "peers")
    monkeypatch.setattr(subprocess, "run", run)
    table.install(find_peer("rapid-mlx"), no_progress)
    assert any("rapid-mlx" in command for command in ran)
    assert [command[1:] for command in ran if "uninstall" in command] == (
        [["uninstall", "--quiet", "--yes", "torchvision"]] if broken else []
    )


def test_a_version_names_what_was_removed_from_a_peers_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    program = tmp_path / "env" / "bin" / "rapid-mlx"
    program.touch()
    for needs, version in (("", "1.2"), ("Requires-Dist: torchvision<0.30\n", "1.2 (without torchvision)")):
        metadata = packages / "rapid_mlx-1.2.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: rapid-mlx\nVersion: 1.2\n{needs}")
        assert table.version_of(find_peer("rapid-mlx"), program) == version
    (packages / "torchvision.py").touch()
    assert table.version_of(find_peer("rapid-mlx"), program) == "1.2"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("ollama version is 0.12.3\n", "0.12.3"),
        ("warning: no server\nversion: 7349 (abc1234)\nbuilt with cc\n", "7349 (abc1234)"),
        ("lms - LM Studio CLI - v0.0.47", "0.0.47"),
        ("no idea", "unknown"),
    ],
)
def test_a_version_is_read_from_what_a_program_says(said: str, version: str) -> None:
    assert read_version(said) == version


def test_what_is_not_known_stays_in_braces() -> None:
    assert fill("{a}-{b}", {"a": "1"}) == "1-{b}"


def test_the_fast_blas_is_for_servers_that_compute_with_mlx_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(table.fastblas, "libraries", lambda: (Path("/a.so"), Path("/b.so")))
    monkeypatch.setenv("INGOT_THREADS", "3")
    found = table.fast_blas(find_peer("mlx_lm.server"))
    assert found["OPENBLAS_NUM_THREADS"] == "3"
    assert found["INGOT_PEER_BLAS"] == os.pathsep.join(("/a.so", "/b.so"))
    assert (Path(found["PYTHONPATH"]) / "sitecustomize.py").is_file()
    assert table.fast_blas(find_peer("llama-server")) == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert table.fast_blas(find_peer("mlx_lm.server")) == {}


def test_names_are_known_once() -> None:
    assert len(set(PEER_NAMES)) == len(PEERS) == 8 and INGOT.name not in PEER_NAMES

"""Two ranks on machines of their own, as far as the network goes: namespaces with a cable between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import tiny
from tests.distributed.groups import write_model
from tests.distributed.serving import PATIENCE_S, engines, is_gone, is_whole, standins, started, wait_until

pytestmark = pytest.mark.slow
STALLED_S = 4.0
LOADING_S = 20.0  # what gives no sign of life for so long while it loads on a busy machine is not lost yet
NAME = f"ingot{os.getpid()}"
NEAR, FAR = f"n{os.getpid()}", f"f{os.getpid()}"
# Addresses of this process alone: a run that was killed leaves its cable behind.
NET = os.getpid() % (1 << 14) * 4
HERE, THERE = (f"10.213.{(NET + number) // 256}.{(NET + number) % 256}" for number in (1, 2))
HOSTS = [{"ssh": "localhost", "ips": [HERE]}, {"ssh": "there", "ips": [THERE], "python": sys.executable}]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture
def cable() -> Iterator[None]:
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAME)
        ip("addr", "add", f"{HERE}/30", "dev", NEAR)
        ip("link", "set", NEAR, "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", FAR)
        ip("-n", NAME, "link", "set", FAR, "up")
        yield
    finally:
        ip("netns", "del", NAME)


@pytest.mark.parametrize("kind", ["stand-ins", "engines"])
def test_a_cut_cable_ends_requests_and_the_group_is_back_when_it_is_mended(
    cable: None, tmp_path: Path, kind: str
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps(HOSTS))
    command = standins(str(hosts), STALLED_S)
    if kind == "engines":
        write_model(tmp_path / "model", tiny.CONFIGS["llama"])
        command = engines(tmp_path / "model", str(hosts), LOADING_S)
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nfor last; do :; done\nexec ip netns exec {NAME} sh -c "$last"\n')
    ssh.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with started(command, path) as group, ThreadPoolExecutor() as clients:
        assert is_whole(group.ask())
        before = group.ranks
        request = clients.submit(group.ask, 4000)
        wait_until(lambda: group.health().get("running") == 1)
        ip("link", "set", NEAR, "down")
        answer = request.result(PATIENCE_S)
        assert "rank " in answer[1]
        assert not is_whole(answer)
        wait_until(lambda: all(map(is_gone, before)))
        assert group.get("/health")[0] == 503
        ip("link", "set", NEAR, "up")
        group.await_ready()
        assert is_whole(group.ask())

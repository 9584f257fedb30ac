from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.distributed.hosts import Host, RankAssignment, RankProcess
from tests.distributed.serving import PATIENCE_S, ROOT, is_gone, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HERE = Host("localhost", ("127.0.0.1",))
THERE = Host("other.example", ("192.0.2.7",), python=sys.executable)
LETTER = RankAssignment(["--port", "1"], {"INGOT_GROUP_TOKEN": "very secret"}, {"MLX_HOSTFILE": "[1, 2]"})
RANK = """
import json, os, sys, time
from pathlib import Path
from ingot.distributed.hosts import read_rank_assignment
letter = read_rank_assignment()
told = {"arguments": letter.arguments, "token": os.environ["INGOT_GROUP_TOKEN"], "pid": os.getpid(),
        "hosts": Path(os.environ["MLX_HOSTFILE"]).read_text(), "key": os.environ.get("INGOT_API_KEY")}
file = Path(os.environ["TOLD"])
file.with_suffix(".part").write_text(json.dumps(told))
file.with_suffix(".part").rename(file)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a rank writes what it was told, and an ssh that runs everything here and writes down what it was given."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/ssh.log\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    monkeypatch.setenv("INGOT_API_KEY", "another secret")
    return tmp_path / "told.json"


@pytest.fixture(params=[HERE, THERE], ids=["here", "there"])
def process(request: pytest.FixtureRequest) -> Iterator[RankProcess]:
    made = RankProcess(request.param, LETTER, (), ("-P", "-c", RANK))
    yield made
    made.kill()
    made.wait(PATIENCE_S)


def test_a_rank_is_told_who_it_is_and_no_secret_stands_on_a_command_line(process: RankProcess, told: Path) -> None:
    wait_until(told.exists)
    found = json.loads(told.read_text())
    assert found["arguments"] == ["--port", "1"]
    assert (found["token"], found["key"], found["hosts"]) == ("very secret", "another secret", "[1, 2]")
    assert "secret" not in Path(f"/proc/{found['pid']}/cmdline").read_text()
    log = told.with_name("ssh.log")
    assert log.exists() != process.is_here
    assert process.is_here or ("other.example" in log.read_text() and "secret" not in log.read_text())


def test_a_killed_rank_is_gone_on_its_own_machine_too(process: RankProcess, told: Path) -> None:
    wait_until(told.exists)
    pid = json.loads(told.read_text())["pid"]
    process.kill(pid)
    assert process.wait(PATIENCE_S) == -9
    assert is_gone(pid)
    assert process.is_here or f"other.example kill -9 {pid}" in told.with_name("ssh.log").read_text()

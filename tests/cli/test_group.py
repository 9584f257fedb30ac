from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ingot.cli.group import find_group_hosts, inherited_listener, refuse_several_models, settings_for_group
from ingot.cli.main import main
from ingot.config import Settings
from ingot.errors import ConfigError


def test_one_process_is_enough_where_nobody_asks_for_several() -> None:
    assert find_group_hosts(Settings()) is None
    assert find_group_hosts(Settings(hosts="1")) is None


@pytest.mark.parametrize(
    "settings", [Settings(hosts="3"), Settings(tensor_parallel_size=3), Settings(pipeline_parallel_size=3, hosts="3")]
)
def test_as_many_ranks_run_here_as_the_settings_ask_for(settings: Settings) -> None:
    hosts = find_group_hosts(settings)
    assert hosts is not None
    assert len(hosts.hosts) == 3


def test_where_nobody_says_how_to_divide_a_model_every_layer_is() -> None:
    assert settings_for_group(Settings(hosts="2"), 2).tensor_parallel_size == 2
    assert settings_for_group(Settings(pipeline_parallel_size=2), 2).tensor_parallel_size == 1


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "localhost", "ips": ["127.0.0.1"]}] * 3))
    with pytest.raises(ConfigError, match="ask for 2 ranks, but there are 3"):
        find_group_hosts(Settings(tensor_parallel_size=2, hosts=str(file)))


def test_several_models_are_not_dealt_out_to_ranks() -> None:
    with pytest.raises(ConfigError, match="the only one of its server"):
        refuse_several_models(Settings(lazy=True))


def test_a_rank_without_the_groups_token_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_WORLD_SIZE", "2")
    assert main(["serve", "nothing"]) == 2
    assert "INGOT_GROUP_TOKEN" in capsys.readouterr().err


def test_sockets_that_the_parent_handed_down_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as parents:
        monkeypatch.setenv("INGOT_LISTEN", str(os.dup(parents.fileno())))
        found = inherited_listener(Settings())
        assert found.port == parents.getsockname()[1]
        found.close()

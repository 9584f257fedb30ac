from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.distributed.place import HostAddress, parse_address, read_rank_config
from ingot.errors import ConfigError

OURS = {"INGOT_CONTROL": "127.0.0.1:4000", "INGOT_WATCH": "127.0.0.1:4001", "INGOT_GROUP_TOKEN": "0123456789abcdef"}


def test_a_process_that_nobody_gave_a_rank_is_alone() -> None:
    assert read_rank_config({}) is None
    assert read_rank_config({"MLX_RANK": "0"}) is None
    assert read_rank_config({"MLX_RANK": "0", "MLX_WORLD_SIZE": "1"}) is None


def test_the_size_is_read_as_each_backend_is_told_it(tmp_path: Path) -> None:
    ring = tmp_path / "ring.json"
    ring.write_text(json.dumps([["127.0.0.1:1"], ["127.0.0.1:2"], ["127.0.0.1:3"]]))
    for told in ({"MLX_HOSTFILE": str(ring)}, {"MLX_IBV_DEVICES": str(ring)}, {"MLX_WORLD_SIZE": "3"}):
        found = read_rank_config({"MLX_RANK": "2", **OURS, **told})
        assert found is not None
        assert (found.rank, found.size) == (2, 3)


def test_our_own_variables_say_where_others_listen() -> None:
    found = read_rank_config({"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", **OURS})
    assert found is not None
    assert (found.control, found.watch) == (HostAddress("127.0.0.1", 4000), HostAddress("127.0.0.1", 4001))
    assert found.token == "0123456789abcdef"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"MLX_RANK": "2"}, "MLX_RANK is 2, of a group of 2"),
        ({"MLX_RANK": "first"}, "MLX_RANK is 'first'"),
        ({"MLX_WORLD_SIZE": "two"}, "MLX_WORLD_SIZE is 'two'"),
        ({"INGOT_CONTROL": "4000"}, "INGOT_CONTROL is '4000'"),
        ({"INGOT_WATCH": "host:0"}, "INGOT_WATCH is 'host:0'"),
        ({"INGOT_GROUP_TOKEN": ""}, "authenticate each other by INGOT_GROUP_TOKEN"),
    ],
)
def test_what_contradicts_itself_is_refused(told: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rank_config({"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", **OURS, **told})


@pytest.mark.parametrize("listed", ["[]", "[[], []]", "{}", "not json"])
def test_a_hostfile_that_lists_nobody_is_refused(tmp_path: Path, listed: str) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(listed)
    with pytest.raises(ConfigError, match="MLX_HOSTFILE"):
        read_rank_config({"MLX_RANK": "0", "MLX_HOSTFILE": str(file)})


def test_under_mlx_launch_rank_0_listens_where_its_backend_is_told_it_is(tmp_path: Path) -> None:
    ring = tmp_path / "ring.json"
    ring.write_text(json.dumps([["10.0.0.1:32323"], ["10.0.0.2:32324"]]))
    world = {"MLX_WORLD_SIZE": "2"}
    for told in (
        {"MLX_HOSTFILE": str(ring)},
        {"NCCL_HOST_IP": "10.0.0.1", **world},
        {"MLX_JACCL_COORDINATOR": "10.0.0.1:32323", **world},
    ):
        found = read_rank_config({"MLX_RANK": "1", "INGOT_GROUP_TOKEN": "0123456789abcdef", **told})
        assert found is not None
        assert (found.control, found.watch) == (HostAddress("10.0.0.1", 32322), None)
    with pytest.raises(ConfigError, match="The address of rank 0 is unknown"):
        read_rank_config({"MLX_RANK": "1", "INGOT_GROUP_TOKEN": "0123456789abcdef", **world})


@pytest.mark.parametrize("text", ["10.0.0.1:80", "[fe80::1]:80", "mac.local:80"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_address(text)) == text

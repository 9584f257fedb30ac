from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.distributed import hosts
from ingot.distributed.hosts import Host, Hosts, parse_hosts, rank_environments
from ingot.distributed.place import read_rank_config
from ingot.errors import ConfigError

HERE = {"ssh": "localhost", "ips": ["127.0.0.1"]}
THERE = {"ssh": "other.example", "ips": ["192.0.2.7"]}


def written(folder: Path, said: Any) -> str:
    file = folder / "hosts.json"
    file.write_text(said if isinstance(said, str) else json.dumps(said))
    return str(file)


def test_a_number_is_so_many_ranks_here() -> None:
    hosts = parse_hosts("3")
    assert hosts.are_here
    assert len(hosts.hosts) == 3
    assert hosts.address == "127.0.0.1"


@pytest.mark.parametrize("said", [[HERE, THERE], {"hosts": [HERE, THERE], "backend": "ring", "envs": ["A=b=c"]}])
def test_a_hostfile_is_read_as_mlx_launch_reads_it(tmp_path: Path, said: Any) -> None:
    hosts = parse_hosts(written(tmp_path, said))
    assert [host.ssh for host in hosts.hosts] == ["localhost", "other.example"]
    assert [host.is_here for host in hosts.hosts] == [True, False]
    assert hosts.address == "127.0.0.1"
    assert hosts.variables == ({"A": "b=c"} if isinstance(said, dict) else {})


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("{", "no hostfile"),
        ([], "0 hosts"),
        ([{"ips": ["127.0.0.1"]}], "no hostfile"),
        ([HERE | {"gpus": 2}], "no hostfile"),
        ([{"ssh": "localhost"}], "has no ips"),
        ([{"ssh": "localhost", "ips": ["localhost"]}], "no address"),
        ([{"ssh": "-oProxyCommand=x", "ips": ["127.0.0.1"]}], "no name of a host"),
        ([THERE, HERE], "is not this machine"),
        ({"hosts": [HERE], "backend": "mpi"}, "backend 'mpi' is none of"),
        ({"hosts": [HERE], "envs": ["A B=1"]}, "is not NAME=VALUE"),
        ({"hosts": [HERE, THERE], "backend": "jaccl"}, "jaccl needs an rdma device"),
    ],
)
def test_a_hostfile_that_cannot_be_honoured_is_refused(tmp_path: Path, said: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_hosts(written(tmp_path, said))


def test_a_hostfile_that_is_not_there_and_numbers_that_are_too_large_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        parse_hosts("/nowhere/hosts.json")
    for count in ("0", "1000"):
        with pytest.raises(ConfigError, match="there can be"):
            parse_hosts(count)


def test_each_rank_of_a_ring_is_told_where_all_listen(tmp_path: Path) -> None:
    for rank, environment in enumerate(rank_environments(parse_hosts("3"))):
        (ring,) = environment.files.values()
        assert len({address for (address,) in json.loads(ring)}) == 3
        found = read_rank_config(
            {**environment.variables, "INGOT_GROUP_TOKEN": "0123456789abcdef", "MLX_HOSTFILE": written(tmp_path, ring)}
        )
        assert found is not None
        assert (found.rank, found.size) == (rank, 3)


def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "usable_cores", lambda: 8)
    monkeypatch.delenv("INGOT_THREADS", raising=False)
    threads = [
        {each.variables.get("INGOT_THREADS") for each in rank_environments(parse_hosts(count))} for count in ("3", "16")
    ]
    assert threads == [{"2"}, {"1"}]
    over_machines = Hosts((Host("localhost", ("127.0.0.1",)), Host("other", ("192.0.2.7",))))
    assert all("INGOT_THREADS" not in environment.variables for environment in rank_environments(over_machines))
    monkeypatch.setenv("INGOT_THREADS", "5")
    assert all("INGOT_THREADS" not in environment.variables for environment in rank_environments(parse_hosts("3")))


def test_a_ring_over_machines_has_the_ports_of_mlx_launch() -> None:
    machines = Hosts((Host("localhost", ("127.0.0.1",)), Host("other", ("192.0.2.7", "192.0.2.8"))))
    assert json.loads(rank_environments(machines)[0].files["MLX_HOSTFILE"]) == [
        ["127.0.0.1:32323"],
        ["192.0.2.7:32324", "192.0.2.8:32325"],
    ]


def test_ranks_of_one_machine_with_nccl_have_a_gpu_each() -> None:
    one, other = Host("localhost", ("127.0.0.1",)), Host("other", ("192.0.2.7",))
    environment = rank_environments(Hosts((one, one, other, other), "nccl", ("NCCL_DEBUG=INFO",)))
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in environment] == ["0", "1", "0", "1"]
    assert all(each.variables["NCCL_HOST_IP"] == "127.0.0.1" for each in environment)
    assert all(each.variables["NCCL_DEBUG"] == "INFO" for each in environment)
    assert not environment[0].files


def test_jaccl_is_told_its_devices() -> None:
    machines = Hosts((Host("a", ("127.0.0.1",), (None, "en2")), Host("b", ("192.0.2.7",), ("en2", None))), "jaccl-ring")
    environment = rank_environments(machines)[1]
    assert json.loads(environment.files["MLX_IBV_DEVICES"]) == [[None, "en2"], ["en2", None]]
    assert environment.variables["MLX_JACCL_COORDINATOR"] == "127.0.0.1:32323"
    assert environment.variables["MLX_JACCL_RING"] == "1"

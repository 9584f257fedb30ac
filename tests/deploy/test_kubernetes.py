"""The manifest starts servers by flags that they have, and the router knows all of them."""

from __future__ import annotations

from typing import Any

import yaml

from bench.replicas import SMG
from tests.docs.pages import ROOT, flags_of

PARTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))


def part(kind: str) -> dict[str, Any]:
    (found,) = [each for each in PARTS if each["kind"] == kind]
    return found


def container(kind: str) -> dict[str, Any]:
    (found,) = part(kind)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_servers_are_started_by_flags_that_they_have() -> None:
    flags = {word.split("=")[0] for word in container("StatefulSet")["args"] if word.startswith("--")}
    assert flags and flags <= flags_of(("serve",))


def test_the_router_knows_every_server_by_a_name_that_it_answers_to() -> None:
    servers = part("StatefulSet")
    names = [f"{servers['metadata']['name']}-{n}.ingot" for n in range(servers["spec"]["replicas"])]
    (line,) = container("Deployment")["args"]
    assert [word for word in line.split() if word.startswith("http")] == [f"http://{name}:8000" for name in names]
    (allowed,) = [word for word in container("StatefulSet")["args"] if word.startswith("--allowed-hosts")]
    assert allowed.split("=")[1].split(",") == names


def test_the_router_is_told_what_was_measured() -> None:
    (line,) = container("Deployment")["args"]
    assert " ".join(SMG) in " ".join(line.split())
    assert " ".join(SMG) in " ".join((ROOT / "docs/scale.md").read_text().split())


def test_a_server_gets_longer_to_stop_than_it_takes() -> None:
    (drain,) = [word for word in container("StatefulSet")["args"] if word.startswith("--drain-s")]
    patience = part("StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert patience > float(drain.split("=")[1])


def test_nginx_lets_tokens_through_as_they_come_and_bodies_as_large_as_the_server_does() -> None:
    text = (ROOT / "deploy/nginx.conf").read_text()
    assert "proxy_buffering off" in text and "hash $session consistent" in text

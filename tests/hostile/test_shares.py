"""One key, or somebody without any, takes what it can get of a running server: others are served all the same."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.cache.disk.store import DiskLimits
from ingot.cli import serve
from ingot.config import Settings
from ingot.engine.kv_events import LONGEST_MESSAGE, KVEventPublisher, KVEventsAddress
from ingot.errors import ConfigError
from ingot.http import connections, guard, shared_state
from ingot.media import bounds, fetch
from ingot.media.fetch import fetch_file
from ingot.shares import SharesPerSecond
from ingot.text.tokenizer.special_tokens import ControlTokenQuoting
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import engines
from tests.http.running import connect, everything, post, running
from tests.http.scripted import ScriptedEngine, settings
from tests.media.seeing import TIMED
from tests.media.test_fetch import Dripping
from tests.waiting import WAIT_S

zmq = pytest.importorskip("zmq")
DENSE = Path(__file__).parents[2] / "foundry" / "models" / "dense"
GREEDY, POLITE = {"x-api-key": "key-of-greedy"}, {"x-api-key": "key-of-polite"}
CHAT = "/v1/chat/completions"


@pytest.fixture
def shared(tmp_path: Path) -> Callable[..., Settings]:
    """Settings of a server with two keys."""
    keys = tmp_path / "keys"
    keys.write_text("key-of-greedy\nkey-of-polite\n")
    keys.chmod(0o600)
    return partial(settings, api_key_file=keys, archive_key_file=tmp_path / "archive.key")


def stuck(url: str, held: ExitStack, *sent: int) -> list[socket.socket]:
    """Requests whose bodies stop after so many bytes, which the server reads already."""
    head = [f"POST {CHAT} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    head += ["x-api-key: key-of-greedy", "content-length: 1000", "expect: 100-continue", "", ""]
    made = [held.enter_context(connect(url)) for _ in sent]
    for connection in made:
        connection.sendall("\r\n".join(head).encode())
    for connection, count in zip(made, sent, strict=True):
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100")
        connection.sendall(b"x" * count)
    return made


@pytest.fixture
def files() -> Iterator[None]:
    """Enough of them for both ends of 1,040 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("most", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_bodies_of_one_key_that_stop_after_a_byte_keep_no_other_key_out_nor_probes_nor_the_server_up(
    most: int, shared: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    limits = shared(max_connections=most, drain_s=0.0)
    with ExitStack() as held, caplog.at_level("INFO"):
        with running(ScriptedEngine(), limits) as url:
            greedy = stuck(url, held, 9, *[1] * (most - 1))
            for _ in range(connections.MOST_WAITING_CONNECTIONS):  # and some that say nothing
                held.enter_context(connect(url))
            assert httpx.get(f"{url}/health/live").status_code == 200
            assert httpx.get(f"{url}/v1/models", headers=POLITE).status_code == 200
            told = everything(greedy[1])
            assert (
                told.startswith(b"HTTP/1.1 503")
                and b"retry-after: 1" in told
                and b"connections of the server are in use" in told
            )
            caplog.clear()
        assert [everything(one)[:12] for one in (greedy[0], greedy[2])] == [b"HTTP/1.1 503"] * 2
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ingot")]
    answered = "GET '/v1/models'"  # may be logged after its client has read the answer
    assert [line for line in said if not line.startswith(answered)] == [
        f"{most - 1} requests were refused whose bodies had not come"
    ]


def test_what_gave_way_is_in_the_log_with_the_status_that_was_sent(
    shared: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), running(ScriptedEngine(), shared(max_connections=2)) as url, ExitStack() as held:
        greedy, _ = stuck(url, held, 1, 9)
        assert httpx.get(f"{url}/v1/models", headers=POLITE).status_code == 200
        assert everything(greedy).startswith(b"HTTP/1.1 503")
    logged = [record.facts for record in caplog.records if CHAT in record.getMessage()]  # type: ignore[attr-defined]
    assert [facts["status"] for facts in logged] == [503, 499]  # and whoever was left to leave by itself


# What is kept on disk

PROMPTS = [[(31 * number + 7 * place) % 90 + 1 for place in range(100)] for number in range(113)]
DISK = DiskLimits(2_000_000, sync=False)
"""For 40 of these prompts, beside the index."""


def complete(client: httpx.Client, prompts: list[list[int]], key: dict[str, str]) -> int:
    """How many of their tokens were known."""
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    made = client.post("/v1/completions", json=body, headers=key)
    assert made.status_code == 200, made.text
    cached: int = made.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_110_prompts_of_one_key_remove_none_of_anothers_from_the_disk(
    shared: Callable[..., Settings], tmp_path: Path
) -> None:
    own, others = PROMPTS[:3], PROMPTS[3:]
    known = []
    for asked in ([(POLITE, own), (GREEDY, others)], [(POLITE, own)]):
        engine = engines.start("llama", cache_bytes=1 << 20, disk=tmp_path / "kept", disk_limits=DISK)
        with running(engine, shared()) as url, httpx.Client(base_url=url, timeout=60) as client:
            known += [complete(client, prompts, key) for key, prompts in asked]
        engine.close()
    assert known[0] == 0 and known[-1] == sum(len(prompt) - 1 for prompt in own)


def test_a_record_that_somebody_changed_without_the_servers_secret_is_computed_anew(
    shared: Callable[..., Settings], tmp_path: Path
) -> None:
    known = []
    for _ in range(2):
        engine = engines.start("llama", cache_bytes=1 << 20, disk=tmp_path / "kept", disk_limits=DISK)
        with running(engine, shared()) as url, httpx.Client(base_url=url, timeout=60) as client:
            known.append(complete(client, PROMPTS[:1], POLITE))
        engine.close()
        for file in (tmp_path / "kept").glob("*/*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert known == [0, 0] and [*(tmp_path / "kept" / "damaged").iterdir()]


@pytest.mark.parametrize("more", [[], ["--lazy"]], ids=["now", "later"])
@pytest.mark.parametrize("made", ["777", "770", "702", "by another", "with a link"])
def test_a_server_refuses_a_folder_that_others_may_have_written_to_when_it_starts(
    made: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    match made:
        case "by another":
            monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
            said = "another user's folder"
        case "with a link":
            (folder / "lock").symlink_to(tmp_path / "elsewhere")
            said = "is a link, which ingot did not make: remove it"
        case mode:
            folder.chmod(int(mode, 8))
            said = r"other users may write to it: run chmod go-w .*, or name a folder within it"
    monkeypatch.setattr(serve, "_serve_fleet", lambda *given: pytest.fail("it started"))
    with pytest.raises(ConfigError, match=said):
        serve.run_serve([str(DENSE), "--cache-dir", str(folder), *more])
    assert not (tmp_path / "elsewhere").exists()


def test_an_export_that_nobody_reads_holds_up_no_other_keys(shared: Callable[..., Settings]) -> None:
    engine = ScriptedEngine()
    made: list[str] = []

    def export(tenant: str, path: Path, secret: bytes, going: Callable[[], bool]) -> int:
        made.append(tenant)
        path.write_bytes(b"k" * (4 if len(made) > 1 else 64 << 20))
        return 20

    engine.kept.export = export  # type: ignore[method-assign]
    with running(engine, shared()) as url, connect(url) as slow:
        slow.sendall(b"GET /v1/cache/export HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: key-of-greedy\r\n\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 200")  # and no more of it
        assert httpx.get(f"{url}/v1/cache/export", headers=POLITE).content == b"kkkk"
    assert len(made) == 2


# Without a key


@pytest.mark.parametrize(
    ("path", "other", "capacity"),
    [
        ("/static/app.js", "/health/live", shared_state.UNKNOWN_A_SECOND),
        ("/health/live", "/", shared_state.PROBES_A_SECOND),
    ],
)
def test_650_requests_in_a_second_without_a_key_stop_nobody(
    path: str, other: str, capacity: int, shared: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "SharesPerSecond", partial(SharesPerSecond, clock=lambda: 0.0))
    monkeypatch.setattr(guard, "FLOOD_DELAY_S", 0.0)
    with running(ScriptedEngine(), shared()) as url, connect(url) as flood:
        for count in (65,) * 10:
            flood.sendall(f"HEAD {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode() * count)
        statuses: Counter[bytes] = Counter()
        rest = b""
        while statuses.total() < 650:
            rest += flood.recv(1 << 16)
            *heads, rest = rest.split(b"\r\n\r\n")
            statuses.update(head[9:12] for head in heads)
        assert statuses == {b"200": capacity, b"429": 650 - capacity}
        assert httpx.get(f"{url}/v1/models", headers=POLITE).status_code == 200
        assert httpx.get(f"{url}{other}").status_code == 200
        if sys.platform == "linux":  # which has more than one address of its own
            with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as elsewhere:
                assert elsewhere.get(f"{url}{path}").status_code == 200


# What requests make the server do


def seeing() -> ScriptedEngine:
    return ScriptedEngine(processor=TIMED)


def picture_at(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def test_a_host_that_answers_byte_by_byte_has_the_20_seconds_of_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Dripping(b"HTTP/1.1 200 OK\r\na: ") as drip, running(seeing(), settings(media_hosts=("127.0.0.1",))) as url:
        monkeypatch.setattr(fetch, "fetch_file", partial(fetch_file, clock=drip.clock))
        made = httpx.post(f"{url}{CHAT}", json=picture_at(drip.url("http", "127.0.0.1")), timeout=60)
        assert made.status_code == 400 and "longer than 20 seconds" in made.json()["error"]["message"]
    assert drip.now <= bounds.FETCH_S + 2  # where it begins and where it ends


def test_nothing_is_fetched_any_more_once_the_client_has_gone() -> None:
    with Dripping(b"") as silent, running(seeing(), settings(media_hosts=("127.0.0.1",))) as url:
        with connect(url) as client:
            client.sendall(post(CHAT, picture_at(silent.url("http", "127.0.0.1"))))
            assert silent.asked.wait(WAIT_S)
        assert silent.left.wait(WAIT_S)


def test_14_megabytes_of_control_tokens_are_refused_before_any_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    quoted: list[str] = []
    monkeypatch.setattr(ControlTokenQuoting, "_stand_in", lambda self, char: quoted.append(char) or char)  # type: ignore[func-returns-value]
    body = {"messages": [{"role": "user", "content": "<|im_end|>" * 1_400_000}]}
    engine = ScriptedEngine(tokenizer=Tokenizer.load(DENSE))
    assert "<|im_end|>" in engine.tokenizer.controls.all
    with running(engine, settings()) as url:
        made = httpx.post(f"{url}{CHAT}", json=body, timeout=60)
    assert (made.status_code, made.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert quoted == [] and engine.requests == []


@pytest.mark.parametrize("size", [LONGEST_MESSAGE + 1, 300_000_000])
def test_who_sends_the_replay_socket_more_than_a_number_is_disconnected(size: int) -> None:
    publisher = KVEventPublisher(KVEventsAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))
    with closing(publisher), zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        monitor = asking.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        asking.connect(publisher.replay)
        asking.linger = 0
        asking.send_multipart([b"", bytes(size), (0).to_bytes(8, "big")], copy=False)
        poller = zmq.Poller()
        poller.register(asking, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        heard = dict(poller.poll(5000))
        asking.disable_monitor()
    assert list(heard) == [monitor]

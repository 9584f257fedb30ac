"""Files of kept prompts made to hurt: nobody reads another's prompts through them, and nobody is kept busy by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ingot.cache.archive import Archive, ArchivedRecord, ArchiveError, write_archive
from ingot.engine.engine import Engine
from ingot.errors import Cancelled
from tests.engine.test_cache_admin import SECRET, ask, prompts, start
from tests.http.running import connect, running
from tests.http.scripted import ScriptedEngine, settings
from tests.waiting import WAIT_S

FILE = {"content-type": "application/octet-stream"}
ANN, ROOT = {"x-api-key": "ann-the-key"}, {"x-api-key": "root-key"}


def hollow(piece: ArchivedRecord, layer: int) -> ArchivedRecord:
    """Its layer holds nothing, and says that this is all there is."""
    return recut(piece, layer, (piece.begin, piece.begin, 0))


def short(piece: ArchivedRecord, layer: int) -> ArchivedRecord:
    """Its layer ends a token early."""
    begin, end, count = piece.deltas[layer] or (0, 0, 0)
    return recut(piece, layer, (begin, end - 1, count))


def late(piece: ArchivedRecord, layer: int) -> ArchivedRecord:
    """Its layer claims to begin a token later than it does."""
    begin, end, count = piece.deltas[layer] or (0, 0, 0)
    return recut(piece, layer, (begin + 1, end, count))


def recut(piece: ArchivedRecord, layer: int, delta: tuple[int, int, int]) -> ArchivedRecord:
    held = [each[2] for each in piece.deltas if each is not None]
    before = sum(each[2] for each in piece.deltas[:layer] if each is not None)
    count = (piece.deltas[layer] or (0, 0, 0))[2]
    kept = range(before, before + delta[2])
    tensors = tuple(
        tensor
        for place, tensor in enumerate(piece.tensors)
        if place >= sum(held) or not before <= place < before + count or place in kept
    )
    deltas = tuple(delta if number == layer else each for number, each in enumerate(piece.deltas))
    return replace(piece, deltas=deltas, tensors=tensors)


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
@pytest.mark.parametrize("forge", [hollow, short, late])
def test_a_file_that_leaves_states_out_is_refused_however_well_it_is_sealed(
    kind: str, forge: Callable[[ArchivedRecord, int], ArchivedRecord], tmp_path: Path
) -> None:
    engine = start(kind, tmp_path / "model")
    ask(engine, "mine", prompts()[0])
    path = tmp_path / "kept.safetensors"
    engine.kept.export("", path, SECRET)
    seal = engine.kept._seal(SECRET)
    whole = Archive.open(path, seal, lambda: True)
    data = list(whole.data())
    for layer, delta in enumerate(whole.pieces[0].deltas):
        if delta is None:
            continue
        forged = forge(whole.pieces[0], layer)
        zeros = [bytes(tensor.nbytes) for tensor in forged.tensors]
        write_archive(path, seal, zip((forged, *whole.pieces[1:]), [zeros, *data[1:]], strict=True), lambda: True)
        with pytest.raises(ArchiveError, match="not laid out like this model's"):
            engine.kept.adopt("bob", path, SECRET)
        assert engine.kept.status("bob").salts == ()
    engine.check()
    engine.close()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[httpx.Client, Engine]]:
    engine = start("llama", tmp_path / "model")
    limits = settings(api_key="ann-the-key", admin_api_key="root-key", archive_key_file=tmp_path / "archive.key")
    with running(engine, limits) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, engine
    engine.close()


def complete(client: httpx.Client, key: dict[str, str]) -> None:
    body = {"prompt": list(range(1, 60)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert client.post("/v1/completions", json=body, headers=key).status_code == 200


def test_only_the_administrator_imports_and_only_what_this_server_wrote(
    keyed: tuple[httpx.Client, Engine], tmp_path: Path
) -> None:
    client, engine = keyed
    complete(client, ROOT)
    own = client.get("/v1/cache/export", headers=ROOT).content
    refused = client.post("/v1/cache/import", content=own, headers=FILE | ANN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "--admin-api-key" in refused.json()["error"]["message"]
    forged = tmp_path / "forged"
    engine.kept.export("", forged, b"a guess")
    foreign = client.post("/v1/cache/import", content=forged.read_bytes(), headers=FILE | ROOT)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (400, "invalid_archive")
    assert "another server's key" in foreign.json()["error"]["message"]
    client.delete("/v1/cache", headers=ROOT)
    assert client.post("/v1/cache/import", content=own, headers=FILE | ROOT).json()["added_tokens"] > 0


def test_without_an_administrator_nobody_imports(tmp_path: Path) -> None:
    with running(ScriptedEngine(), settings(api_key="ann-the-key")) as url, httpx.Client(base_url=url) as client:
        assert client.post("/v1/cache/import", content=b"kept", headers=FILE | ANN).status_code == 403


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
def test_a_page_elsewhere_cannot_make_a_browser_fetch_the_file(tmp_path: Path, site: str, status: int) -> None:
    limits = settings(archive_key_file=tmp_path / "archive.key")
    with running(ScriptedEngine(), limits) as url, httpx.Client(base_url=url) as client:
        assert client.get("/v1/cache/export", headers={"sec-fetch-site": site}).status_code == status


class Endless:
    """Reads a file that never ends, until it is told to stop."""

    def __init__(self) -> None:
        self.begun, self.stopped = threading.Event(), threading.Event()

    def adopt(self, tenant: str, path: Path, secret: bytes, going: Callable[[], bool]) -> int:
        self.begun.set()
        while going():
            self.stopped.wait(0.01)
        self.stopped.set()
        raise Cancelled("nobody waits")


def import_request() -> bytes:
    head = "POST /v1/cache/import HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/octet-stream\r\n"
    return f"{head}content-length: 4\r\n\r\nkept".encode()


def test_an_import_ends_with_its_client(tmp_path: Path) -> None:
    engine, endless = ScriptedEngine(), Endless()
    engine.kept = endless  # type: ignore[assignment]
    with running(engine, settings(archive_key_file=tmp_path / "archive.key")) as url:
        with connect(url) as connection:
            connection.sendall(import_request())
            assert endless.begun.wait(WAIT_S)
        assert endless.stopped.wait(WAIT_S)


def test_an_import_ends_with_the_server(tmp_path: Path) -> None:
    engine, endless = ScriptedEngine(), Endless()
    engine.kept = endless  # type: ignore[assignment]
    with running(engine, settings(archive_key_file=tmp_path / "archive.key", drain_s=0.1)) as url:
        connection = connect(url)
        connection.sendall(import_request())
        assert endless.begun.wait(WAIT_S)
    assert endless.stopped.is_set()
    assert b"503" in connection.recv(100)
    connection.close()


def test_the_engine_stops_between_two_pieces(tmp_path: Path) -> None:
    engine = start("llama", tmp_path / "model")
    for number, prompt in enumerate(prompts()):
        ask(engine, f"mine{number}", prompt)
    path = tmp_path / "kept.safetensors"
    engine.kept.export("", path, SECRET)
    pieces = len(Archive.open(path, engine.kept._seal(SECRET), lambda: True).pieces)
    asked: list[None] = []

    def going() -> bool:
        asked.append(None)
        return len(asked) < pieces

    with pytest.raises(Cancelled):
        engine.kept.adopt("bob", path, SECRET, going)
    assert len(asked) == pieces
    held = sum(salt.tokens for salt in engine.kept.status("bob").salts)
    assert 0 < held < sum(salt.tokens for salt in engine.kept.status("").salts)
    with pytest.raises(Cancelled):
        engine.kept.export("", path, SECRET, lambda: False)
    engine.check()
    engine.close()

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ingot.models.files.hub import is_hub_id, split_gguf_id
from tests import processes
from tests.waiting import WAIT_S

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(50_000),
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# hello",
}
GGUFS = {
    "README.md": b"# hello",
    "Toy-Q8_0.gguf": b"whole",
    "toy.q4_k_m.gguf": b"small letters",
    "Q4_K/Toy-Q4_K-00001-of-00002.gguf": b"one",
    "Q4_K/Toy-Q4_K-00002-of-00002.gguf": b"two",
    "Toy-F16.gguf": b"plain",
    "Other-F16.gguf": b"another",
}
SCRIPT = """
import json, sys
from pathlib import Path
from ingot.config.settings import Settings
from ingot.errors import ModelError
from ingot.models.files.hub import fetch_from_hub, fetch_gguf_from_hub
said = []
settings = Settings(offline=sys.argv[2] == "offline")
try:
    repo, _, kind = sys.argv[1].partition(":")
    if kind:
        folder = fetch_gguf_from_hub(repo, kind, settings, lambda *report: None).parent
    else:
        folder = fetch_from_hub(repo, settings, lambda *report: said.append(report))
    print(json.dumps({"files": sorted(path.name for path in Path(folder).iterdir()), "said": said}))
except ModelError as error:
    print(json.dumps({"error": error.message}))
"""


DENSE = Path(__file__).parents[3] / "foundry/models/dense"
ADD_SCRIPT = """
import asyncio, json, sys
from ingot.config import Settings, model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.errors import IngotError

async def add(fleet, name):
    seen = []
    task = asyncio.ensure_future(fleet.add(fleet.new_entry(name)))
    while not task.done():
        seen += [(status.state, status.progress) for status in fleet.statuses() if status.name == name]
        await asyncio.sleep(0.005)
    try:
        await task
    except IngotError as error:
        return {"error": error.message, "served": [status.name for status in fleet.statuses()]}
    return {"seen": seen, "served": [status.name for status in fleet.statuses()]}

settings = Settings(models={"one": {"path": sys.argv[2]}}, lazy=True, memory="2GiB", cache_dir=None)
entries = model_entries(settings)
loader = ModelLoader(settings, entries)
print(json.dumps(asyncio.run(add(Fleet(entries, loader, loader.memory), sys.argv[1]))))
loader.close()
"""


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    def do_GET(self) -> None:
        if "/gated/" in self.path:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if "/missing/" in self.path:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/broken/" in self.path:
            return self.answer(418, b"{}", {})
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            return self.answer(200, json.dumps(self.listing(path)).encode(), {"Content-Type": "application/json"})
        content = self.files.get(path.partition(f"/resolve/{COMMIT}/")[2])
        if content is None:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    @property
    def files(self) -> dict[str, bytes]:
        if "/dense" in self.path:
            return {file.name: file.read_bytes() for file in DENSE.iterdir()}
        return GGUFS if "/ggufs" in self.path else FILES

    def listing(self, path: str) -> Any:
        if "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
        siblings = [{"rfilename": name} for name in self.files]
        return {"_id": "1", "id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def fetched(endpoint: str, home: Path, repo: str, mode: str = "online", script: str = SCRIPT) -> dict[str, Any]:
    """In a process of its own, as the hub's library reads its environment when it is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    result = processes.run(
        [sys.executable, "-c", script, repo, mode], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_server_that_runs_fetches_another_model_and_shows_how_far_it_is(hub: str, home: Path) -> None:
    added = fetched(hub, home, "org/dense", str(DENSE), ADD_SCRIPT)
    assert added["served"] == ["one", "org/dense"]
    shares = [progress for state, progress in added["seen"] if state == "loading" and progress is not None]
    assert shares and all(0 <= share <= 1 for share in shares)
    missing = fetched(hub, home, "missing/name", str(DENSE), ADD_SCRIPT)
    assert "there is no model 'missing/name' on the hub" in missing["error"] and missing["served"] == ["one"]


def test_a_model_is_fetched_without_code_and_pickles_and_then_served_offline(hub: str, home: Path) -> None:
    answer = fetched(hub, home, "org/name")
    assert answer["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    messages = [report[0] for report in answer["said"]]
    assert messages[0] == "looking up org/name" and set(messages[1:]) == {"fetching org/name"}
    total = sum(len(FILES[name]) for name in answer["files"])
    assert answer["said"][-1][1:] == [total, total]
    assert fetched("http://127.0.0.1:9", home, "org/name", "offline")["files"] == answer["files"]


def test_all_parts_of_a_gguf_file_are_fetched_and_no_other_file(hub: str, home: Path) -> None:
    names = ["Toy-Q4_K-00001-of-00002.gguf", "Toy-Q4_K-00002-of-00002.gguf"]
    assert fetched(hub, home, "org/ggufs:Q4_K")["files"] == names
    assert {path.name for path in home.rglob("*.gguf")} == set(names)
    assert fetched("http://127.0.0.1:9", home, "org/ggufs:q4_k", "offline")["files"] == names


def test_the_kind_of_a_gguf_file_is_known_in_any_case(hub: str, home: Path) -> None:
    assert "Toy-Q8_0.gguf" in fetched(hub, home, "org/ggufs:q8_0")["files"]
    assert "toy.q4_k_m.gguf" in fetched(hub, home, "org/ggufs:Q4_K_M")["files"]


def test_a_kind_that_no_gguf_file_has_or_several_have_is_refused(hub: str, home: Path) -> None:
    assert "no GGUF file whose name ends in IQ2_M.gguf" in fetched(hub, home, "org/ggufs:IQ2_M")["error"]
    assert "several GGUF files of the kind F16: Other-F16, Toy-F16" in fetched(hub, home, "org/ggufs:F16")["error"]


def test_a_gated_model_says_how_to_get_in(hub: str, home: Path) -> None:
    assert "accept its terms" in fetched(hub, home, "gated/name")["error"]


def test_a_model_that_is_not_there_is_said_so(hub: str, home: Path) -> None:
    assert fetched(hub, home, "missing/name")["error"].startswith("there is no model 'missing/name' on the hub")


def test_a_hub_that_fails_is_said_so(hub: str, home: Path) -> None:
    assert "broken/name" in fetched(hub, home, "broken/name")["error"]


def test_without_a_network_the_user_is_told_what_to_check(home: Path) -> None:
    assert "check the network and the proxy" in fetched("http://127.0.0.1:9", home, "org/name")["error"]


def test_offline_a_model_that_was_never_fetched_is_refused(home: Path) -> None:
    error = fetched("http://127.0.0.1:9", home, "org/name", "offline")["error"]
    assert "--offline forbids fetching it; run `ingot pull org/name` once" in error


def test_a_kind_behind_a_hub_id_means_a_gguf_file() -> None:
    assert split_gguf_id("org/name-GGUF:Q4_K_M") == ("org/name-GGUF", "Q4_K_M")
    assert all(split_gguf_id(name) is None for name in ("org/name", "name:Q4", "org/name:", "org/name:a/b", "a/b:[x]"))


def test_hub_ids_are_told_from_other_names() -> None:
    assert all(is_hub_id(name) for name in ("org/name", "mlx-community/Qwen3-4B-4bit", "a.b/c_d.e"))
    assert not any(is_hub_id(name) for name in ("name", "a/b/c", "/a/b", "../a", "a/", "org/na me", "./x"))

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ingot.models.hub import is_hub_id

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(50_000),
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# hello",
}
SCRIPT = """
import json, sys
from pathlib import Path
from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.hub import fetch
said = []
try:
    folder = fetch(sys.argv[1], Settings(offline=sys.argv[2] == "offline"), lambda *report: said.append(report))
    print(json.dumps({"files": sorted(path.name for path in Path(folder).iterdir()), "said": said}))
except ModelError as error:
    print(json.dumps({"error": error.message}))
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
        content = FILES[path.rpartition("/")[2]]
        etag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def listing(self, path: str) -> Any:
        if "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
        siblings = [{"rfilename": name} for name in FILES]
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


def fetched(endpoint: str, home: Path, repo: str, mode: str = "online") -> dict[str, Any]:
    """In a process of its own, as the hub's library reads its environment when it is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repo, mode], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_model_is_fetched_without_code_and_pickles_and_then_served_offline(hub: str, home: Path) -> None:
    answer = fetched(hub, home, "org/name")
    assert answer["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    messages = [report[0] for report in answer["said"]]
    assert messages[0] == "looking up org/name" and set(messages[1:]) == {"fetching org/name"}
    total = sum(len(FILES[name]) for name in answer["files"])
    assert answer["said"][-1][1:] == [total, total]
    assert fetched("http://127.0.0.1:9", home, "org/name", "offline")["files"] == answer["files"]


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


def test_hub_ids_are_told_from_other_names() -> None:
    assert all(is_hub_id(name) for name in ("org/name", "mlx-community/Qwen3-4B-4bit", "a.b/c_d.e"))
    assert not any(is_hub_id(name) for name in ("name", "a/b/c", "/a/b", "../a", "a/", "org/na me", "./x"))

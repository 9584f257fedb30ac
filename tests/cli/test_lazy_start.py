"""What a lazy server imports before it is ready: imports are most of what its start takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

START: Final = """
import sys
from contextlib import closing
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.serve import lone
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import Garage
from ingot.http.fleet.app import build_fleet_app
from ingot.http.app import import_soon
from ingot.http.server import listen, server_of

parser = CommandParser("serve", "")
parser.add_argument("model")
add_settings(parser)
settings = settle(parser.parse(["smollm2-135m", "--lazy", "--port", "0"])).settings
with closing(listen(settings)) as listener:
    fleet = Fleet([lone(settings)], None, 0)
    server_of(build_fleet_app(fleet, lambda: None, settings), settings, print, listener)
print(*sys.modules, sep="\\n")
"""
LIBRARIES: Final = (
    *("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "torch", "huggingface_hub", "gguf", "numpy", "jinja2"),
    *("yaml", "llguidance", "PIL", "av", "zmq", "opentelemetry", "mcp", "httpx", "importlib.metadata", "pydantic"),
)
ROOMS: Final = {
    "cache": {"codecs.names"},
    "engine": {"health", "loop", "engine_thread", "fleet", "fleet_standing", "fleet_seat", "loading.model_loader"}
    | {"speech_request", "speculation.options"},
    "kernels": {"device", "cpu.fastblas", "remedy"},
    "media": {"fetched", "fetch", "bounds", "worker"},
    "models": {"files", "gguf.part_names"},
    "protocol": {"operations", "errors", "model_names", "terms", "ingot_api.health", "chat.receipt_headers"}
    | {"anthropic.errors", "ollama.errors", "responses.stored_response"},
    "ranks": {"meeting", "standing"},
    "distributed": {"place", "wire", "heartbeat"},
    "text": {"cancellation", "input_files", "json_file", "grammar.limits", "grammar.pending"}
    | {"tokens.generation_config"},
}
"""Of rooms that are large, what a server may take that has no model yet."""


def allowed(module: str) -> bool:
    """What is listed, what it lies in, and what lies in it."""
    room, _, rest = module.partition(".")
    path = f"{rest}."
    known = [f"{one}." for one in ROOMS.get(room, {rest})]
    return not rest or any(path.startswith(one) or one.startswith(path) for one in known)


def test_a_lazy_server_is_ready_before_anything_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "ingot.http.fleet.app" in loaded
    assert [name for name in LIBRARIES if name in loaded] == []
    own = [name.removeprefix("ingot.") for name in loaded if name.startswith("ingot.")]
    assert [name for name in own if not allowed(name)] == []

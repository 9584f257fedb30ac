"""What a server imports before it is ready: imports are most of what its start takes."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from foundry.package import MODELS

START: Final = """
import sys
from contextlib import closing
from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.cli.serve import single_model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.http.app import build_fleet_app
from ingot.http.server import open_listener, make_app_server

parser = CommandParser("serve", "")
parser.add_argument("model")
add_settings(parser)
settings = settings_from_arguments(parser.parse(["smollm2-135m", "--lazy", "--port", "0"])).settings
with closing(open_listener(settings)) as listener:
    fleet = Fleet(single_model_entries(settings), None, 0)
    make_app_server(build_fleet_app(fleet, lambda: None, settings), settings, print, listener)
print(*sys.modules, sep="\\n")
"""
LIBRARIES: Final = (
    *("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "torch", "huggingface_hub", "gguf", "numpy", "jinja2"),
    *("yaml", "llguidance", "PIL", "av", "zmq", "opentelemetry", "mcp", "httpx", "importlib.metadata", "pydantic"),
)
ROOMS: Final = {
    "cache": {"codecs.names"},
    "distributed": {"place", "wire", "heartbeat"},
    "engine": {
        "status",
        "loop",
        "fleet",
        "model_swap",
        "speech_request",
        "speculation.options",
        "loading.model_loader",
    },
    "kernels": {"device", "cpu.fastblas"},
    "media": {"fetch", "bounds", "worker"},
    "models": {"files"},
    "protocol": {"operations", "errors", "terms", "ingot_api.health", "responses.stored_response"},
    "text": {"cancellation", "input_files", "grammar.limits", "grammar.pending"},
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
    assert "ingot.http.app" in loaded
    assert [name for name in LIBRARIES if name in loaded] == []
    own = [name.removeprefix("ingot.") for name in loaded if name.startswith("ingot.")]
    assert [name for name in own if not allowed(name)] == []


RESIDENT: Final = """
import os, sys
from pathlib import Path
from ingot.cli.serve import load_resident_models
from ingot.config import Settings, single_model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.model_loader import ModelLoader
from ingot.http.app import build_fleet_app
from ingot.http.server import open_listener, make_app_server

def list_modules(url):
    print(*sys.modules, sep="\\n", flush=True)
    os._exit(0)

settings = Settings(model=sys.argv[1], port=0, prefix_cache=False)
loader = ModelLoader(settings, single_model_entries(settings))
app = build_fleet_app(Fleet.of_resident(load_resident_models(loader)), loader.health, settings)
make_app_server(app, settings, list_modules, open_listener(settings)).run()
"""
LATER: Final = (
    *("transformers", "huggingface_hub", "torch", "mlx_vlm", "gguf.gguf_writer", "yaml", "llguidance", "PIL", "av"),
    *("zmq", "opentelemetry", "mcp", "httpx", "pydantic", "ingot.http.endpoints.table", "ingot.http.accounting"),
    *("ingot.protocol.openai", "ingot.protocol.responses.request", "ingot.protocol.anthropic", "ingot.protocol.ollama"),
    *("ingot.models.kokoro", "ingot.models.whisper", "ingot.models.pooling_models", "ingot.models.gguf.architectures"),
    *("ingot.models.memory_needs", "ingot.models.convert", "ingot.text.grammar.compile_process"),
)


def test_a_server_of_one_model_is_ready_before_what_only_requests_need_is_imported() -> None:
    command = [sys.executable, "-c", RESIDENT, str(MODELS / "dense")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    loaded = done.stdout.split()
    assert {"mlx.core", "ingot.engine.core", "ingot.http.service"} <= {*loaded}
    assert [name for name in LATER if name in loaded] == []

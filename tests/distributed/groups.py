"""Groups of ranks on this machine, as processes of their own, which end with the test that started them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import random_models
from tests import tiny
from tests.processes import start

DEADLINE_S = 600.0
"""On a machine that does much else: MLX's ring takes 50 ms for a sum where three ranks share two busy cores, and
kernels for GPUs that are run without one take minutes."""

KILLED_S = 60.0


def write_model(folder: Path, config: dict[str, Any]) -> None:
    import mlx.core as mx
    from mlx.nn import quantize
    from mlx.utils import tree_flatten

    random_models.write_tokenizer(folder, tiny.VOCAB)
    model = random_models.build(config, spread=0.2)
    if "quantization" in config:
        quantize(model, **config["quantization"])
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": tiny.VOCAB - 1}))


def environments(size: int, folder: Path) -> list[dict[str, str]]:
    """Of each rank: a ring on loopback."""
    with ExitStack() as entries:
        sockets = [entries.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size + 1)]
        *ports, control = [each.getsockname()[1] for each in sockets]
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    shared = {
        **os.environ,
        "MLX_HOSTFILE": str(hosts),
        "INGOT_CONTROL": f"127.0.0.1:{control}",
        "INGOT_GROUP_TOKEN": "of nobody but this test",
        "INGOT_THREADS": "1",
    }
    return [{**shared, "MLX_RANK": str(rank)} for rank in range(size)]


def run(module: str, arguments: list[str], size: int, folder: Path) -> str:
    """What rank 0 writes. Every rank has to end by itself, and well."""
    command = [sys.executable, "-m", module, *arguments]
    message = [folder / f"rank-{rank}.out" for rank in range(size)]  # files: a full pipe would keep a rank waiting
    errors = [folder / f"rank-{rank}.err" for rank in range(size)]
    deadline = time.monotonic() + DEADLINE_S
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, variables in enumerate(environments(size, folder)):
            with message[rank].open("wb") as out, errors[rank].open("wb") as err:
                ranks.append(start(command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
        codes = [rank.wait(max(deadline - time.monotonic(), 0.0)) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise AssertionError("ranks do not end:\n" + _ends_of(errors)) from None
    finally:
        for each in ranks:
            each.kill()
            each.wait(KILLED_S)
    assert not any(codes), f"ranks ended with {codes}:\n" + _ends_of(errors)
    return message[0].read_text()


def _ends_of(files: list[Path]) -> str:
    return "\n--\n".join(file.read_text(errors="replace")[-3000:] for file in files)

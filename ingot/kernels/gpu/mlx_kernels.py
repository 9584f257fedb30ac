"""MLX's own CUDA kernels: the folder where MLX looks for compiled ones, and compiling some of them ahead.

MLX compiles many of its operations when a process first needs them, one after another, for two to four seconds each,
and stores the result. `MlxCompilation` has other processes compile those that most models need, several at once, while
weights are read. Each such process (`python -m ingot.kernels.gpu.mlx_kernels`) runs a few operations on tiny arrays in
a folder of its own, and moves complete files from there to where MLX looks.

Our kernels lie in that folder, too, so that no launch carries their bytes: MLX copies and hashes what it is given at
every launch, tens of kilobytes a kernel. Before it loads a module for the first time it looks for a file named after
the kernel and that hash; so a kernel that lies there under the name for no bytes at all is launched with none. Where
MLX looks elsewhere, loading fails, and bytes are given after all.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.kernels.gpu.nvrtc import DEFAULT_CUBIN_FOLDER, private_folder, write_atomically
from ingot.observe.logs import report_step
from ingot.quantities import counted

log = logging.getLogger("ingot.kernels")

MLX_CACHE_VARIABLE: Final = "MLX_PTX_CACHE_DIR"
NO_BYTES_HASH: Final = 0x553E93901E462A6E
"""The hash of no bytes, by the C++ library that MLX is built with on Linux."""
GRAPH_EXTENSION: Final = "graph extension"
"""The task that compiles no kernel, but the extension that launches graphs."""
ROUTER: Final = "router of "
"""Begins a task for what mlx-lm's router of a family has MLX fuse; the family's type follows."""
BYTES_A_PROCESS: Final = 4 << 30
"""Of the device's free memory, for each process that compiles: it takes an eighth of that."""
COMPILING_LIMIT_S: Final = 120.0
"""After which a process that compiles ahead is not waited for."""


class MlxKernelFolder:
    """A folder of MLX's. Any thread or process may write to it."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where it cannot be made, or others may write to it."""
        self.folder = private_folder(folder)

    @classmethod
    def usual(cls, architecture: str) -> MlxKernelFolder:
        """The one that MLX is told to use, or one next to other kernels of ours, of which MLX is told, for this version
        of MLX and this architecture: MLX's names for kernels have neither. That must be said before MLX compiles its
        first kernel: it listens once."""
        version = importlib.metadata.version("mlx")
        own = DEFAULT_CUBIN_FOLDER.expanduser().parent / "mlx-kernels" / f"{version}-{architecture}"
        return cls(Path(os.environ.setdefault(MLX_CACHE_VARIABLE, str(own))))

    def lay(self, name: str, function: str, cubin: bytes) -> None:
        """Let a function be launched by a name, which is another one for other bytes. Raises OSError."""
        kernel = self.folder / f"{name}_{NO_BYTES_HASH:x}.ptx"
        if kernel.exists() and kernel.read_bytes() == cubin:
            return
        write_atomically(kernel.with_suffix(".txt"), f"{name}\t{function}\n".encode())
        write_atomically(kernel, cubin)

    def missing(self, tasks: Iterable[str]) -> list[str]:
        """Those that were not completed before."""
        return [task for task in tasks if not self._stamp(task).exists()]

    def take_over(self, made: Path, task: str) -> None:
        """Move the kernels that a task left in its own folder here: their names first, as MLX reads them last."""
        for file in sorted(made.iterdir(), key=lambda file: file.suffix != ".txt"):
            file.replace(self.folder / file.name)
        self._stamp(task).touch()

    def _stamp(self, task: str) -> Path:
        return self.folder / f"{task.replace(' ', '-')}.compiled"


@dataclass(frozen=True, slots=True)
class CompilationNeeds:
    """What decides which of MLX's kernels a model needs."""

    dtype: str  # of activations, as mlx calls it
    family: str = ""  # its type, if it has experts
    gelu: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str | None) -> CompilationNeeds:
        """As a model's config says. What it does not say is guessed: then MLX compiles later what was missed."""
        inner = {**config, **(config.get("text_config") or {})}
        stated = str(dtype or inner.get("dtype") or inner.get("torch_dtype") or "bfloat16").rsplit(".", 1)[-1]
        experts = any("experts" in name and isinstance(value, int) and value > 1 for name, value in inner.items())
        activation = str(inner.get("hidden_activation") or inner.get("hidden_act") or inner.get("model_type"))
        gelu = any(word in activation for word in ("gelu", "gemma"))
        family = str(inner.get("model_type")) if experts else ""
        return cls(stated if stated in ("float16", "float32") else "bfloat16", family, gelu)

    @property
    def tasks(self) -> list[str]:
        """Names of tasks, those that take longest first."""
        needed = {"experts": bool(self.family), "gelu": self.gelu, "silu": not self.gelu}
        kinds = [kind for kind in RECIPES if needed.get(kind.partition(" ")[0], True)]
        routers = [f"{ROUTER}{self.family}"] if self.family else []
        return [*(f"{kind} {self.dtype}" for kind in (*routers, *kinds)), GRAPH_EXTENSION]


class MlxCompilation:
    """Compiles ahead, in processes that run beside this one."""

    def __init__(self, folder: MlxKernelFolder, tasks: Sequence[str], processes: int) -> None:
        self._began, self._count = time.monotonic(), len(tasks)
        shares = [tasks[first::processes] for first in range(min(processes, len(tasks)))]
        self._processes = [_start_worker(folder.folder, share) for share in shares]

    @classmethod
    def begin(cls, folder: MlxKernelFolder, needs: CompilationNeeds, device_bytes: int) -> MlxCompilation | None:
        """None where nothing is missing."""
        tasks = folder.missing(needs.tasks)
        if not tasks:
            return None
        log.info("MLX compiles %d kernels for this device, once, while weights are read", len(tasks))
        most = min(os.cpu_count() or 1, device_bytes // BYTES_A_PROCESS)
        return cls(folder, tasks, max(1, most))

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Returns when no process is left, and calls `meanwhile` now and then; where that raises, all processes end.
        What one of them could not compile, MLX compiles in this process."""
        report_step(f"MLX compiles {counted(self._count, 'kernel')}, once for this machine")
        try:
            for process in self._processes:
                self._wait_for(process, meanwhile)
        finally:
            for process in self._processes:
                process.kill()
        log.info("MLX compiled %d kernels ahead, in %.1f s", self._count, time.monotonic() - self._began)

    def _wait_for(self, process: subprocess.Popen[bytes], meanwhile: Callable[[], None]) -> None:
        while time.monotonic() < self._began + COMPILING_LIMIT_S:
            try:
                _, said = process.communicate(timeout=0.05)
            except subprocess.TimeoutExpired:
                meanwhile()
                continue
            if process.returncode:
                log.warning("kernels could not be compiled ahead: %s", said.decode(errors="replace").strip()[-500:])
            return


def _start_worker(folder: Path, tasks: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ingot.kernels.gpu.mlx_kernels", str(folder), *tasks]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def _recipes() -> dict[str, Callable[[Any], Any]]:
    """What to compute for a kind of task, by the dtype of activations. The first word of a kind says which models need
    it, if not all do."""

    def rows(table: str | None, index: str) -> Callable[[Any], Any]:
        """Rows of a table: of embeddings, of their packed weights, or of what belongs to tokens."""
        return lambda dtype: _zeros(table or dtype, 8, 16)[_zeros(index, 4)]

    def chosen(scores: str | None, index: str) -> Callable[[Any], Any]:
        """Numbers of each token, such as the scores of the experts that a router chose."""

        def make(dtype: Any) -> Any:
            import mlx.core as mx

            return mx.take_along_axis(_zeros(scores or dtype, 1, 4, 8), _zeros(index, 1, 4, 2), axis=-1)

        return make

    def gate(form: str | None) -> Callable[[Any], Any]:
        """Gates that mlx-lm has MLX fuse."""

        def make(dtype: Any) -> Any:
            from ingot.upstream import swiglu

            return swiglu(_zeros(form or dtype, 16, 64), _zeros(form or dtype, 16, 64) + 1)

        return make

    def gelu(dtype: Any) -> Any:
        from mlx import nn

        return nn.gelu_approx(_zeros(dtype, 16, 64))

    def gelu_gate(dtype: Any) -> Any:
        from ingot.upstream import import_upstream

        return import_upstream("mlx_lm.models.gemma4_text").geglu(_zeros(dtype, 16, 64), _zeros(dtype, 16, 64) + 1)

    def clipped_residual(dtype: Any) -> Any:
        from ingot.upstream import import_upstream

        residual = import_upstream("mlx_lm.models.gemma3_text").clip_residual
        return residual(_zeros(dtype, 16, 64), _zeros(dtype, 16, 64) + 1)

    return {
        "gelu gate": gelu_gate,
        "gelu residual": clipped_residual,
        "numbers by int32": chosen(None, "int32"),
        "experts scores by uint32": chosen(None, "uint32"),
        "experts float scores by int32": chosen("float32", "int32"),
        "experts float scores by uint32": chosen("float32", "uint32"),
        "gelu": gelu,
        "silu gate": gate(None),
        "experts float gate": gate("float32"),
        "rows by int32": rows(None, "int32"),
        "packed rows by int32": rows("uint32", "int32"),
        "rows by uint32": rows(None, "uint32"),
        "packed rows by uint32": rows("uint32", "uint32"),
        "float rows by uint32": rows("float32", "uint32"),
        "places": lambda dtype: _zeros(dtype, 8, 16)[_zeros("int64", 4), _zeros("int64", 4)],
        "experts numbers by uint32": rows("int32", "uint32"),
        "experts bytes by uint32": rows("uint8", "uint32"),
    }


def _zeros(dtype: Any, *shape: int) -> Any:
    import mlx.core as mx

    return mx.zeros(shape, getattr(mx, dtype) if isinstance(dtype, str) else dtype)


RECIPES: Final = _recipes()
"""By a task's name without its dtype."""


def run_task(task: str) -> None:
    """Compute what needs the kernels of a task."""
    if task == GRAPH_EXTENSION:
        from ingot.kernels.gpu.cuda_graph import graph_extension

        graph_extension()
        return
    import mlx.core as mx

    kind, _, dtype = task.rpartition(" ")
    if kind.startswith(ROUTER):
        mx.eval(_chosen_experts(kind.removeprefix(ROUTER), getattr(mx, dtype)))
        return
    mx.eval(RECIPES[kind](getattr(mx, dtype)))


def _chosen_experts(family: str, dtype: Any) -> Any:
    """What the router of a family of mlx-lm's gives, where it is a function of its own."""
    import mlx.core as mx

    from ingot.upstream import model_classes

    try:
        module = sys.modules[model_classes({"model_type": family.removesuffix("_text")})[0].__module__]
    except ValueError:  # a family of another package
        return []
    select = getattr(module, "group_expert_select", None) or getattr(module, "_group_expert_select", None)
    if select is None:
        return []
    arguments = (_zeros(dtype, 1, 4, 8), mx.zeros(8), 2, 1, 1, 1.5, True, "sigmoid")
    return select(*arguments[: len(inspect.signature(select).parameters)])


def main(folder: Path, tasks: Sequence[str]) -> None:
    """In a process of its own, which has compiled nothing yet."""
    target = MlxKernelFolder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ahead-") as made:
        os.environ[MLX_CACHE_VARIABLE] = made
        for task in tasks:
            try:
                run_task(task)
            finally:  # what fails once fails again: it is not tried at each start
                target.take_over(Path(made), task)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

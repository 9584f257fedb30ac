"""Python processes without the price of their imports: forks of one that has imported ingot already.

`start` and `run` take the place of `subprocess.Popen` and `subprocess.run` where it is not a process's own start that
is tested. A command that needs a real start gets one: options of Python, variables that are read by imports, anything
but Linux (elsewhere a fork has no use of its GPU). Forks have a session of their own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, AnyStr, Final

ROOT: Final = Path(__file__).parents[1]
INGOT: Final = str(Path(sys.executable).with_name("ingot"))
IMPORTED: Final = (
    *("ingot.cli.serve", "ingot.cli.models", "ingot.cli.chat", "ingot.cli.bench", "ingot.http.app"),
    *("ingot.http.endpoints.table", "ingot.http.endpoints.responses", "ingot.engine.loading.fleet_models"),
    *("ingot.engine.loading.model_loader", "ingot.engine.loading.language_model", "ingot_native"),
    *("ingot.engine.loading.pooling_and_speech", "ingot.distributed.leader", "ingot.distributed.follower"),
    *("mlx_lm.models.llama", "mlx_lm.models.qwen3", "uvicorn.loops.asyncio", "uvicorn.lifespan.off"),
    *("anyio._backends._asyncio", "ingot.cli.main", "ingot.http.server", "llguidance", "httpx", "tests.http.scripted"),
)
READ_BY_IMPORTS: Final = ("PYTHON", "INGOT_KERNELS", "INGOT_ISA", "OPENBLAS", "OMP_", "LD_")
"""How variables begin that a fork would come too late for. The hub's library has many more: it is not imported."""
MOST_BYTES: Final = 1 << 17


class Fork(subprocess.Popen[AnyStr]):
    """A child of the process that forks, which passes on how it ends."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        pipes: list[int] = [asked[name] for name in names]
        stdio: list[int] = [own if pipe == -1 else pipe for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        reading, writing = os.pipe()
        self._end: FileIO = os.fdopen(reading, "rb", buffering=0)
        self._reading: threading.Lock = threading.Lock()
        task = {"command": asked["args"], "cwd": os.fspath(asked["cwd"] or Path.cwd())}
        task["env"] = dict(os.environ if asked["env"] is None else asked["env"])
        control, message = forking_process(), json.dumps(task).encode()
        assert control is not None and len(message) <= MOST_BYTES
        socket.send_fds(control, [message], [*stdio, writing])
        os.close(writing)
        self.pid = int.from_bytes(self._end.read(4), "little")
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _ended(self, within_s: float | None) -> int | None:
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        if self.returncode is None and waiting.poll(None if within_s is None else within_s * 1000):
            with self._reading:
                if self.returncode is None:
                    code = self._end.read(4)
                    assert code, "whoever waited for it has died"
                    self.returncode = int.from_bytes(code, "little", signed=True)
        return self.returncode

    def poll(self) -> int | None:
        return self._ended(0)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


def start(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of a Python program: a fork wherever that does."""
    return (Fork if may_fork(command, **how) else subprocess.Popen)(command, **how)


def run(
    command: Sequence[str],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a Python program."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        how["stdin"] = subprocess.PIPE
    with start(command, **how) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def may_fork(command: Sequence[str], env: Mapping[str, str] | None = None, **how: Any) -> bool:
    words = [*command[1:], ""] if command[0] == sys.executable else command
    known = {"stdin", "stdout", "stderr", "text", "cwd", "start_new_session"}
    return (
        sys.platform == "linux"
        and how.keys() <= known
        and (words[0] in ("-c", "-m") or words[0].endswith(".py") or words[0] == INGOT)
        and (env is None or read_by_imports(env) == read_by_imports(os.environ))
        and forking_process() is not None
    )


def read_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in env if name.startswith(READ_BY_IMPORTS) and name != "PYTHONPATH"}


@functools.cache
def forking_process() -> socket.socket | None:
    """A line to the process that forks, which ends with this one; None where it must not fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.processes", str(theirs.fileno())]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # more of them would be threads, already
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours if ours.recv(1) else None


def forks(control: socket.socket) -> dict[str, Any]:
    """Forks for each task, and returns with it in the child."""
    while True:
        message, files, _, _ = socket.recv_fds(control, MOST_BYTES, 4)
        while has_children() and os.waitpid(-1, os.WNOHANG)[0]:
            pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for each in files:
            os.close(each)
    control.close()
    *stdio, end = files
    if child := os.fork():
        for each in stdio:
            os.close(each)
        os.write(end, child.to_bytes(4, "little"))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(end, code.to_bytes(4, "little", signed=True))
        os._exit(0)
    os.setsid()
    for number, each in enumerate(stdio):
        os.dup2(each, number)
    os.closerange(3, max(files) + 1)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    task: dict[str, Any] = json.loads(message)
    return task


def has_children() -> bool:
    return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text())


def become(command: list[str], env: dict[str, str], cwd: str) -> tuple[types.CodeType, dict[str, Any]]:
    """What Python would make of a command: the code to run, and the names that it sees."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = command if command[0] == sys.executable else [sys.executable, *command]
    module = types.ModuleType("__main__")
    match sys.orig_argv[1:]:
        case ["-c", source, *words]:
            sys.argv, sys.path[0], code = ["-c", *words], "", compile(source, "<string>", "exec")
        case ["-m", name, *words]:
            sys.path[0] = cwd
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            module.__spec__, module.__file__, sys.argv = spec, spec.origin, [spec.origin, *words]
            code = spec.loader.get_code(name)  # type: ignore[union-attr]
        case [file, *_]:
            module.__file__ = file
            sys.argv, sys.path[0] = sys.orig_argv[1:], str(Path(file).resolve().parent)
            code = compile(Path(file).read_bytes(), file, "exec")
    sys.modules["__main__"] = module
    return code, module.__dict__


if __name__ == "__main__":
    _control = socket.socket(fileno=int(sys.argv[1]))
    for _name in IMPORTED:
        importlib.import_module(_name)
    if threading.active_count() == 1 and len([*Path("/proc/self/task").iterdir()]) == 1:
        _control.send(b"1")
        gc.collect()
        gc.freeze()
        exec(*become(**forks(_control)))

"""How a rank's process begins: it reads who it is from its standard input, and never outlives its parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import tempfile
import threading
from typing import Final

import msgspec

from ingot.ranks.processes import Letter
from ingot.ranks.signs import ORPHANED

PR_SET_PDEATHSIG: Final = 1


def arrive() -> Letter:
    """What the parent says, with its variables set and its files written. To be called first, by the main thread."""
    if sys.platform == "linux":  # elsewhere the end of the parent's pipe has to do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(ORPHANED)
    letter = msgspec.json.decode(line, type=Letter)
    os.environ.update(letter.variables)
    for name, content in letter.files.items():
        os.environ[name] = _kept(content)
    threading.Thread(target=_end_with_parent, name="ingot-parent", daemon=True).start()
    return letter


def _kept(content: str) -> str:
    """The path of a file for this process alone; on Linux one that is gone with it, however it ends."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("ingot-rank")
        path = f"/proc/self/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="ingot-rank-")
        atexit.register(os.unlink, path)
    os.write(descriptor, content.encode())
    return path


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(ORPHANED)

"""What operations borrow from Python goes back without waiting for Python's lock."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ingot.kernels.cpu import native

SCRIPT = """
import threading

import ingot.engine
import mlx.core as mx
from ingot.kernels.cpu import native

weights = native.plain_weights(mx.ones((64, 64)), None)
done = threading.Event()

def compute():
    mx.set_default_device(mx.cpu)
    while not done.is_set():
        mx.async_eval([native.linear(mx.ones((8, 64)), weights) for _ in range(20)])
        mx.synchronize()
    mx.synchronize()
    mx.clear_streams()

other = threading.Thread(target=compute)
other.start()
for _ in range(300):
    mx.eval(mx.ones((1 << 16,)))  # which leaves something to clear
    mx.clear_cache()  # waits for all threads' operations, with Python's lock
done.set()
other.join()
print("through")
"""


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_a_thread_that_waits_for_an_operation_with_pythons_lock_does_not_wait_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "through", done.stderr[-500:]

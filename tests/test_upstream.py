import subprocess
import sys

SAME_PROCESS = """
import os, resource, signal, sys, threading, warnings
def settings():
    return (
        resource.getrlimit(resource.RLIMIT_NOFILE), dict(os.environ), os.getcwd(), os.umask(os.umask(0)),
        sys.getrecursionlimit(), {s: signal.getsignal(s) for s in signal.valid_signals()},
        sys.modules.get("resource"), resource.setrlimit,
    )
def check():
    for one, other in zip(before, settings()):
        assert one == other, (one, other)
before = settings()
import ingot.engine.start, ingot.upstream
assert "mlx_vlm" not in sys.modules, "text models pay for what only those need that see"
check()
ingot.upstream.import_upstream("mlx_vlm.utils")
check()
"""


def test_importing_the_product_and_then_what_sees_leaves_the_process_as_it_was() -> None:
    subprocess.run([sys.executable, "-c", SAME_PROCESS], check=True, timeout=120)

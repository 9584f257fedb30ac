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
before = settings()
import ingot.engine.start, ingot.upstream
assert "mlx_vlm" not in sys.modules, "text models pay for what only those need that see"
EXTRA
after = settings()
for one, other in zip(before, after):
    assert one == other, (one, other)
"""


def test_importing_the_product_leaves_the_process_as_it_was() -> None:
    subprocess.run([sys.executable, "-c", SAME_PROCESS.replace("EXTRA", "")], check=True, timeout=120)


def test_so_does_importing_what_sees() -> None:
    seeing = "ingot.upstream.import_upstream('mlx_vlm.utils')"
    subprocess.run([sys.executable, "-c", SAME_PROCESS.replace("EXTRA", seeing)], check=True, timeout=120)

"""Run by Python itself in a server that ingot is compared with, because `PYTHONPATH` names this folder.

On Linux CPUs, MLX comes with a reference BLAS that would decide every comparison. Here it gets the same one as in
ingot, with as many threads, before MLX is imported. And the queue of connections of Python's own HTTP server, which is
five long, gets longer: of sixteen clients at once some were reset, or waited a second for TCP to try again.

Imports nothing of ingot, which that environment does not have.
"""

import ctypes
import os
import socketserver

socketserver.TCPServer.request_queue_size = 1024
if "INGOT_PEER_BLAS" in os.environ:
    openblas, bridge = os.environ["INGOT_PEER_BLAS"].split(os.pathsep)
    fast = ctypes.CDLL(openblas)
    fast.scipy_openblas_set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS", "1")))
    loaded = ctypes.CDLL(bridge, mode=ctypes.RTLD_GLOBAL)
    loaded.ingot_blas_use.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    loaded.ingot_blas_use(
        ctypes.cast(fast.scipy_cblas_sgemm, ctypes.c_void_p), ctypes.cast(fast.scipy_cblas_sgemv, ctypes.c_void_p)
    )

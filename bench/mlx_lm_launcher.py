"""`python -m bench.mlx_lm_launcher FLAGS`: mlx_lm.server as it is, without two handicaps.

On Linux CPUs mlx comes with a reference BLAS that would decide every comparison. It is replaced before mlx is imported,
by the same code and with the same number of threads as in ingot; elsewhere that does nothing. And its socket queues
five connections, so that of sixteen at once some are reset, or wait a second for TCP to retry: here the queue is long
enough.
"""

from __future__ import annotations

from http.server import ThreadingHTTPServer

from ingot.kernels.cpu import fastblas

QUEUED_CONNECTIONS = 1024


def main() -> None:
    fastblas.install()
    ThreadingHTTPServer.request_queue_size = QUEUED_CONNECTIONS
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()

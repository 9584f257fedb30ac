from collections.abc import Iterator

import pytest

from tests.engines import acting_as
from tests.one_path import one_path

__all__ = ["one_path"]
# Those of GPUs begin with the kinds that their kernels take; the others' pages are gathered.
KERNELS = (
    "kernel",
    "kernel-window",
    "kernel-hybrid",
    "kernel-granite",
    "kernel-falcon",
    "window",
    "hybrid",
    "moe",
    "moe-streamed",
    "mixed",
)
RECURRENT = ("kernel-mamba-packed", "kernel-conv-packed", "kernel-kda-packed")
KINDS = {
    "cpu": ("llama", "tied", "window", "hybrid", "moe", "moe-streamed", "mixed", "indexed"),
    "cuda": ("kernel-packed", "kernel-window-packed", "kernel-hybrid-packed", *RECURRENT, *KERNELS),
    "metal": (*RECURRENT, *KERNELS),
}
PLACES = [(rules, kind) for rules, kinds in KINDS.items() for kind in kinds]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kind of layers, by the rules of a kind of device."""
    rules, kind = request.param
    with acting_as(rules):
        yield kind

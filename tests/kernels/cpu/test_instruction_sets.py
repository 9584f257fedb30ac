"""The native kernels by the instructions of other CPUs, in processes that are told to use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.kernels.cpu import native

HERE = Path(__file__).parent
FILES = [
    str(HERE / f"test_{name}.py") for name in ("weights", "blocks", "pages", "convolve", "coded", "codecs", "attend")
]
TOLD = (
    "right_for_any_shape or large_number or test_blocks.py or changes_no_bit or share_pages or far_from_zero"
    " or test_coded.py or (test_codecs.py and 64) or whole_and_in_pieces"
)


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "isa", ["portable", *(pytest.param(isa, marks=pytest.mark.slow) for isa in ("avx2", "avx512", "avx512vnni"))]
)
def test_slower_instruction_sets_give_the_same_numbers(isa: str, cases: str) -> None:
    if os.environ.get("INGOT_ISA"):
        pytest.skip("already running with another instruction set")
    environment = {**os.environ, "INGOT_ISA": isa}
    show = "from ingot.kernels.cpu import native; print(native.arithmetic(deterministic=False), native.has_wide())"
    asking = [sys.executable, "-c", f"import ingot.engine; {show}"]
    told = subprocess.run(asking, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    used = told.split(",")[0]
    if used != isa and isa != "portable":
        pytest.skip(f"this machine has no {isa}")
    assert used == isa and told.endswith("False\n"), "slower sets compute many rows as one, and are told apart"
    assert told != f"{native.arithmetic(deterministic=False)} False\n"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", cases, "-k", TOLD, *FILES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]

"""What is compared with MLX's own products at load, and what is not used."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, cycle

import mlx.core as mx
import pytest

from ingot.kernels.dense_matmul import kernels
from ingot.kernels.dense_matmul.kernels import (
    DTYPES,
    RACED,
    ROUNDS,
    TUNING_CHOICES,
    CheckedDense,
    DenseProduct,
    DenseWeights,
    check_dense_product,
    race_dense_product,
)
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated
GPU, MAC = Device("cuda", "a GPU", 1), Device("metal", "a Mac", 1)


def weights(
    outputs: int = 20, columns: int = 1544, dtype: mx.Dtype = mx.bfloat16, *, biased: bool = False
) -> DenseWeights:
    weight, bias = mx.random.normal((outputs, columns)), 100 * mx.random.normal((outputs,))
    return DenseWeights(weight.astype(dtype), bias.astype(dtype) if biased else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_that_are_right_pass(biased: bool, dtype: mx.Dtype) -> None:
    assert check_dense_product(GPU, weights(dtype=dtype, biased=biased)) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("low.y, x.x, x.y", "low.y, x.x, x.x", "multiply differs for 20x1544 in mlx.core.bfloat16"),
        ("(size_t)row * outputs", "(size_t)0", "multiply differs"),
        (
            "y[at] = T(sum);",
            "y[at] = T(sum * (1.0f + rows * 1e-4f));",
            "a row's product depends on how many rows there are",
        ),
        ("sum += float(bias[output]);", "", "multiply differs for 20x1544 in mlx.core.bfloat16 with a bias"),
        ("T(sum)", "T(summ)", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set[str]()

    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            broken.update({text.name} if old in text.body else ())
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    dense = CheckedDense(GPU)
    assert dense.of(weights(biased="bias" in old)) is None and broken
    assert next(iter(dense.wrong.values())).startswith(said)


def test_what_is_wrong_by_one_cut_is_multiplied_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace("weights + slot * STAGE", "weights + free_slot * STAGE"))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    dense = CheckedDense(GPU)
    product = dense.of(weights())
    assert product is not None and product._tuning == TUNING_CHOICES[1] and not dense.wrong


def ticking(*spans: float) -> Iterator[float]:
    """What a clock says when works take so long by turns."""
    return accumulate(chain([0.0], *([span, 0.0] for span in spans)))


@pytest.mark.parametrize(
    ("ours", "said"), [((1.0, 1.0), None), ((1.2, 1.0), None), ((1.0, 1.4), "takes 1.40 times as long")]
)
def test_a_kernel_that_loses_a_race_by_much_is_named(ours: tuple[float, float], said: str | None) -> None:
    spans = [span for mine in ours for span in (mine, 1.0) * ROUNDS]
    assert len(spans) == 2 * ROUNDS * len(RACED)
    clock = ticking(*spans)
    found = race_dense_product(DenseProduct(Emulator()), weights(8, 16), lambda: next(clock))
    assert found is said is None or str(found).startswith(str(said))


def test_no_layer_is_swapped_where_the_largest_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = weights(40, 64), weights(8, 64)
    monkeypatch.setattr(kernels, "RACED_BYTES", large.weight.nbytes)
    monkeypatch.setattr(kernels, "Emulator", type(None))  # on a GPU there is none
    asked: list[DenseWeights] = []
    verdicts = cycle(["takes long", None])
    monkeypatch.setattr(kernels, "race_dense_product", lambda product, layer: asked.append(layer) or next(verdicts))
    lost, won = CheckedDense(GPU), CheckedDense(GPU)
    for dense in (lost, won):
        dense.meet([small, large])
    assert [layer.kind for layer in asked] == [large.kind] * 2
    assert lost.of(small) is None and [*lost.wrong.values()] == ["takes long"]
    assert won.of(small) is not None and not won.wrong


def test_the_emulator_is_in_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "RACED_BYTES", 1)
    monkeypatch.setattr(kernels, "race_dense_product", lambda product, layer: "takes long")
    dense = CheckedDense(GPU)
    dense.meet([weights(8, 64)])
    assert dense.of(weights(8, 64)) is not None


def test_a_mac_is_left_mlxs_own_kernels_and_that_is_nothing_wrong() -> None:
    dense = CheckedDense(MAC)
    dense.meet([weights()])
    assert dense.of(weights()) is None and not dense.wrong

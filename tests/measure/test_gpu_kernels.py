from __future__ import annotations

import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.measure.gpu_kernels import gpu_subjects
from ingot.measure.subjects import figure_of
from tests.engines import GPU

MAC = Device("metal", "a Mac", 1 << 34)
OF_ALL_GPUS = (
    *("attention 64", "attention 128", "attention 256", "attention 512", "attention latent 576", "prompt of"),
    *("norms, RoPE and append", "gated delta", "Mamba 2", "short convolution"),
)
OF_CUDA = (
    *("dense product", "packed product 4 bits", "packed product 8 bits", "packed product mxfp4", "by experts"),
    *("experts 4 bits", "experts mxfp4", "choice of", "sum of", "sum and norm", "joint norm", "gate of an MLP"),
    *("LoRA", "sampling"),
)
pytestmark = pytest.mark.skipif(not Emulator.available(), reason="kernels are emulated with g++")


def test_every_family_of_kernels_is_measured_where_it_is_used() -> None:
    cuda, metal = ([subject.name for subject in gpu_subjects(device)] for device in (GPU, MAC))
    for family in (*OF_ALL_GPUS, *OF_CUDA):
        assert any(family in name for name in cuda), family
        assert any(family in name for name in metal) == (family in OF_ALL_GPUS), family
    assert len({*cuda}) == len(cuda)


def test_a_cpu_has_none_of_them() -> None:
    assert [*gpu_subjects(Device("cpu", "a CPU", 1))] == []


@pytest.mark.parametrize(
    "name",
    [
        "attention 64, 2 x 70",
        "attention 64, prompt of 32",
        "norms, RoPE and append, 8 tokens",
        "gated delta, 8 x 1 tokens",
        "Mamba 2, 8 x 1 tokens",
        "short convolution, 1 x 20 tokens",
        "dense product 16 bits, 8 rows",
        "choice of 2 of 4 experts, 8 tokens",
        "sum of 2 experts, 8 tokens",
        "gate of an MLP, 8 tokens",
        "packed product 4 bits, 1 rows",
        "packed product mxfp4, 8 rows",
        "packed product 4 bits by experts, 4 x 2",
        "experts 4 bits, prompt of 20",
    ],
)
def test_a_kernel_is_right_and_close_to_what_mlx_computes(name: str) -> None:
    [subject] = [each for each in gpu_subjects(GPU) if each.name == name]
    figure = figure_of(subject, seconds=0)
    assert (figure.right, figure.wrong, figure.note) == (True, None, None)
    assert figure.off is not None and figure.off < 0.05 and figure.ratio is not None


@pytest.mark.slow
@pytest.mark.parametrize("device", [GPU, MAC], ids=["cuda", "metal"])
def test_all_kernels_are_right_and_close_to_what_mlx_computes(device: Device) -> None:
    for subject in gpu_subjects(device):
        figure = figure_of(subject, seconds=0)
        assert figure.right is not False and "fails" not in (figure.note or ""), figure
        assert figure.off is None or figure.off < 0.05, figure


def test_what_there_is_no_kernel_for_here_is_said() -> None:
    [subject] = [each for each in gpu_subjects(GPU) if each.name == "sampling, 8 rows"]
    figure = figure_of(subject, seconds=0)
    assert figure.right is None and figure.note == "an emulated GPU samples by plain operations"

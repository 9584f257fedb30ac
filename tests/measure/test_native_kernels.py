from __future__ import annotations

import pytest

from ingot.kernels.cpu import native
from ingot.measure.native_kernels import native_subjects
from ingot.measure.subjects import Subject, figure_of

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")
FAMILIES = (
    *("attention", "product 4 bits", "product 8 bits", "product mxfp4", "product 16 bits", "experts 4 bits"),
    *("gated delta", "Mamba 2", "short convolution", "norm", "gate of an MLP", "sampling"),
)


def test_every_family_of_native_kernels_is_measured() -> None:
    names = [subject.name for subject in native_subjects()]
    for family in FAMILIES:
        assert any(family in name for name in names), family
    assert len({*names}) == len(names)


@pytest.mark.parametrize("subject", list(native_subjects()), ids=lambda subject: subject.name)
def test_a_native_kernel_is_right_and_is_timed(subject: Subject) -> None:
    figure = figure_of(subject, seconds=0)
    assert (figure.right, figure.wrong, figure.note) == (True, None, None)
    assert figure.part is not None and figure.ratio is not None


def test_without_native_kernels_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert [*native_subjects()] == []

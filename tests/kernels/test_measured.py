from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.kernels import measured
from ingot.kernels.device import Device
from ingot.kernels.measured import SlowerParts, forget, mean_ratio, remember, slower_parts

MAC = Device("metal", "Apple M9", 1)
GPU = Device("cuda", "NVIDIA H9", 1)
PART = measured.packed_part(4)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "cache" / "measured.json"
    monkeypatch.setattr(measured, "MEASURED_FILE", found)
    monkeypatch.delenv(measured.MEASURED_VARIABLE, raising=False)
    return found


def test_what_was_slower_on_a_device_is_left_out_there_and_said() -> None:
    assert remember(MAC, {"sampling": 1.5, "native norms": 0.2}) == ["sampling"]
    found = slower_parts(MAC)
    assert found.leave_out("sampling") and not found.leave_out("native norms")
    assert found.notes == [
        "sampling by MLX's own operations: measured slower on this device by `ingot doctor --measure` "
        "(1.50 times MLX's time)"
    ]


def test_only_parts_that_a_model_would_use_are_in_its_notes() -> None:
    remember(MAC, {"sampling": 1.5, "native norms": 2.0})
    found = slower_parts(MAC)
    assert found.notes == []
    found.leave_out("native norms")
    assert len(found.notes) == 1


def test_a_difference_that_may_be_noise_leaves_nothing_out() -> None:
    assert remember(MAC, {"sampling": measured.MARGIN}) == []


def test_kernels_of_decode_graphs_may_be_a_little_slower_on_cuda() -> None:
    slightly = {PART: 1.2, "sampling": 1.2}
    assert remember(GPU, slightly) == ["sampling"]
    assert remember(MAC, slightly) == sorted(slightly)
    assert remember(GPU, {PART: 1.4}) == sorted([PART, "sampling"])


def test_what_was_not_measured_again_stays_and_what_was_is_replaced() -> None:
    remember(MAC, {"sampling": 1.5, "native norms": 2.0})
    assert remember(MAC, {"sampling": 0.9}) == ["native norms"]


def test_another_device_is_not_affected() -> None:
    remember(MAC, {"sampling": 1.5})
    remember(GPU, {"native norms": 1.5})
    assert not slower_parts(GPU).leave_out("sampling")
    assert slower_parts(MAC).leave_out("sampling")


@pytest.mark.parametrize("name", ["__version__", "installed_version"])
def test_another_version_is_measured_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(MAC, {"sampling": 1.5})
    monkeypatch.setattr(measured, name, "9.9" if name == "__version__" else lambda package: "9.9")
    assert not slower_parts(MAC).leave_out("sampling")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"measured": 3}',
        '{"measured": [{"device": "x"}]}',
        '{"measured": [{"device": "x", "ingot": "1", "mlx": "1", "slower": {"sampling": "much"}}]}',
        '{"measured": [{"device": "x", "ingot": "1", "mlx": "1", "slower": {"sampling": NaN}}]}',
    ],
)
def test_a_damaged_file_is_ignored_with_a_note_and_written_anew(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text)
    found = slower_parts(MAC)
    assert not found.leave_out("sampling")
    [note] = found.notes
    assert "is ignored" in note and str(file) in note
    remember(MAC, {"sampling": 1.5})
    assert slower_parts(MAC).leave_out("sampling")


def test_a_folder_in_its_place_is_ignored_with_a_note(file: Path) -> None:
    file.mkdir(parents=True)
    assert "is ignored" in slower_parts(MAC).notes[0]


def test_forgetting_leaves_nothing_out() -> None:
    assert not forget()
    remember(MAC, {"sampling": 1.5})
    assert forget()
    assert not slower_parts(MAC).leave_out("sampling")


def test_a_variable_has_everything_used(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(MAC, {"sampling": 1.5})
    monkeypatch.setenv(measured.MEASURED_VARIABLE, "ignore")
    assert not slower_parts(MAC).leave_out("sampling")


def test_the_file_says_what_it_is_of(file: Path) -> None:
    remember(MAC, {"sampling": 1.5})
    [entry] = json.loads(file.read_text())["measured"]
    assert entry["device"] == "metal: Apple M9" and entry["slower"] == {"sampling": 1.5}
    assert {"ingot", "mlx"} < entry.keys()


def test_twice_as_fast_and_twice_as_slow_are_even() -> None:
    assert mean_ratio([0.5, 2.0]) == pytest.approx(1.0)


def test_without_findings_nothing_is_left_out() -> None:
    assert not SlowerParts().leave_out("sampling") and SlowerParts().notes == []

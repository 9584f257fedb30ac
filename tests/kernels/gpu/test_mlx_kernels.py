"""MLX finds what was compiled for it, by us or by other processes that run while weights are read."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels.gpu.launcher import CudaLauncher
from ingot.kernels.gpu.mlx_kernels import (
    GRAPH_EXTENSION,
    MLX_CACHE_VARIABLE,
    NO_BYTES_HASH,
    ROUTER,
    CompilationNeeds,
    MlxCompilation,
    MlxKernelFolder,
    run_task,
)
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, needs_compiler
from tests.kernels.gpu.test_launcher import CudaLauncherDevice, halve

KERNEL_TASKS = sorted(
    {task for gelu in (True, False) for task in CompilationNeeds("bfloat16", "glm4_moe_lite", gelu).tasks}
    - {GRAPH_EXTENSION}
)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaLauncherDevice:
    made = CudaLauncherDevice(tmp_path)
    shelf = MlxKernelFolder(tmp_path / "shelf")
    made.run = CudaLauncher(fake_nvrtc(tmp_path), "sm_90a", None, made.compiled_by_mlx, shelf)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: made.precompiled(**call))
    return made


@needs_compiler
def test_a_launch_carries_a_name_under_which_mlx_finds_the_bytes(device: CudaLauncherDevice, tmp_path: Path) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        halve(device.run, dtype)
    assert [call["compiled_source"] for call in device.calls] == [b"", b""]
    for call in device.calls:
        kernel = tmp_path / "shelf" / f"{call['name']}_{NO_BYTES_HASH:x}.ptx"
        name, function = kernel.with_suffix(".txt").read_text().split()
        assert name == call["name"]
        assert f"void {function}(" in kernel.read_text()
    assert len({call["name"] for call in device.calls}) == 2


@needs_compiler
def test_where_mlx_looks_elsewhere_the_bytes_are_carried_after_all(
    device: CudaLauncherDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_elsewhere(**call: object) -> list[mx.array]:
        if not call["compiled_source"]:
            raise RuntimeError("Failed to load compiled kernel")
        return device.precompiled(**call)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", looks_elsewhere)
    for _ in range(3):
        halve(device.run)
    assert len(device.calls) == 3 and not device.by_mlx
    for call in device.calls:
        assert f"void {call['name']}(".encode() in call["compiled_source"]


@needs_compiler
def test_mlx_is_told_of_the_folder_unless_it_was_told_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(MLX_CACHE_VARIABLE, raising=False)
    version = importlib.metadata.version("mlx")
    own = tmp_path / f".cache/ingot/mlx-kernels/{version}-sm_90a"
    assert MlxKernelFolder.usual("sm_90a").folder == Path(os.environ[MLX_CACHE_VARIABLE]) == own
    monkeypatch.setenv(MLX_CACHE_VARIABLE, str(tmp_path / "other"))
    assert MlxKernelFolder.usual("sm_90a").folder == tmp_path / "other"


@needs_compiler
def test_what_lies_there_is_not_written_again(tmp_path: Path) -> None:
    shelf = MlxKernelFolder(tmp_path)
    shelf.lay("a", "f", b"123")
    [kernel] = tmp_path.glob("*.ptx")
    before = kernel.stat().st_mtime_ns
    shelf.lay("a", "f", b"123")
    assert kernel.stat().st_mtime_ns == before
    shelf.lay("a", "f", b"1234")
    assert kernel.read_bytes() == b"1234" and len(list(tmp_path.iterdir())) == 2


@needs_compiler
def test_what_was_damaged_there_is_written_again(tmp_path: Path) -> None:
    shelf = MlxKernelFolder(tmp_path)
    shelf.lay("a", "f", b"123")
    [kernel] = tmp_path.glob("*.ptx")
    kernel.write_bytes(b"1x3")
    shelf.lay("a", "f", b"123")
    assert kernel.read_bytes() == b"123"


@needs_compiler
def test_a_folder_that_others_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        MlxKernelFolder(tmp_path / "shared")


@pytest.mark.parametrize("task", KERNEL_TASKS)
def test_a_task_computes_something_small(task: str) -> None:
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run_task(task)
    assert mx.get_peak_memory() - before < 1 << 20


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "kimi_linear", "nemotron_h", "qwen3_5_moe_text", "of_nobody"]
)
def test_routers_of_all_families_are_computed_as_mlx_lm_calls_them(family: str) -> None:
    run_task(f"{ROUTER}{family} float32")


def test_models_without_experts_need_no_routers() -> None:
    dense, mixture = (CompilationNeeds("bfloat16", family).tasks for family in ("", "kimi_linear"))
    assert {*dense} < {*mixture}
    assert not any("experts" in task for task in dense)


@pytest.mark.parametrize(
    ("config", "dtype", "needs"),
    [
        ({"torch_dtype": "float16"}, None, CompilationNeeds("float16")),
        ({"dtype": "torch.bfloat16", "num_experts": 1}, None, CompilationNeeds("bfloat16")),
        (
            {"text_config": {"model_type": "glm4_moe", "dtype": "float16", "n_routed_experts": 64}},
            None,
            CompilationNeeds("float16", "glm4_moe"),
        ),
        ({"torch_dtype": "float16"}, "float32", CompilationNeeds("float32")),
        ({"torch_dtype": "something"}, None, CompilationNeeds("bfloat16")),
        ({"hidden_activation": "gelu_pytorch_tanh"}, None, CompilationNeeds("bfloat16", gelu=True)),
    ],
)
def test_a_config_says_what_a_model_needs(
    config: dict[str, object], dtype: str | None, needs: CompilationNeeds
) -> None:
    assert CompilationNeeds.of(config, dtype) == needs


def test_kernels_are_moved_once_their_names_are_there_and_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = MlxKernelFolder(tmp_path / "mlx"), tmp_path / "made"
    made.mkdir()
    for name in ("b.ptx", "a.txt", "a.ptx", "b.txt"):
        (made / name).write_text(name)
    moved: list[str] = []
    monkeypatch.setattr(Path, "replace", lambda self, target: moved.append(self.name))
    folder.take_over(made, "gate bfloat16")
    assert [Path(name).suffix for name in moved] == [".txt", ".txt", ".ptx", ".ptx"]
    assert folder.missing(["gate bfloat16", "gate float16"]) == ["gate float16"]


def test_other_processes_complete_tasks_and_leave_nothing_else(tmp_path: Path) -> None:
    folder, calls = MlxKernelFolder(tmp_path / "mlx"), []
    compilation = MlxCompilation(folder, ["rows by int32 float32"], 2)
    compilation.wait(lambda: calls.append(1))
    assert calls and folder.missing(["rows by int32 float32"]) == []
    assert [file.suffix for file in folder.folder.iterdir()] == [".compiled"]


def test_a_task_that_fails_is_logged_once_and_left_to_mlx(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = MlxKernelFolder(tmp_path / "mlx")
    with caplog.at_level(logging.WARNING, "ingot.kernels"):
        MlxCompilation(folder, ["no such thing float32"], 1).wait(lambda: None)
    assert "could not be compiled ahead" in caplog.text and "no such thing" in caplog.text
    assert not folder.missing(["no such thing float32"])


def test_a_load_that_is_given_up_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = MlxCompilation(MlxKernelFolder(tmp_path / "mlx"), KERNEL_TASKS, 1)
    [process] = compilation._processes

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compilation.wait(give_up)
    assert process.wait(30) != 0

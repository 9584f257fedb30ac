from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from foundry.package import MODELS
from ingot.cli.bench import run_bench
from ingot.cli.peers import command, table
from ingot.cli.peers.command import read_choice, short_reason
from ingot.cli.peers.comparison import Match
from ingot.cli.peers.models import Forms, Traits, read_traits, write_dense, write_twin
from ingot.cli.peers.report import Report
from ingot.cli.peers.table import INGOT, PEER_NAMES, find_peer
from ingot.cli.peers.works import WORK_NAMES, Load
from ingot.errors import ConfigError
from tests.cli.scripted import environment
from tests.processes import INGOT as PROGRAM

TRAITS = Traits(context=40_000, tools=True, vision=False, hybrid=False, draft_head=False)
FORMS = Forms("m", None, TRAITS, {"own-endless": Path("own"), "mlx-ending": Path("mlx")})


def test_without_flags_all_peers_do_all_work() -> None:
    chosen = read_choice({})
    assert chosen.peers == PEER_NAMES and tuple(work.name for work in chosen.works) == WORK_NAMES
    load = chosen.load_of(FORMS)
    assert load.streams == (1, 8, 16, 32) and load.course.opening == 10_000 and load.course.tokens == 16_000


def test_flags_choose_peers_work_and_how_much_of_it() -> None:
    flags: dict[str, Any] = {"peers": "llama-server,vllm-mlx", "work": "kill,agent", "streams": "2,4", "rounds": "7"}
    chosen = read_choice(flags | {"flags": ["ingot=--kv-codec k8v4", "ingot=--lazy", "vllm-mlx=--a 'b c'"]})
    assert chosen.peers == ("llama-server", "vllm-mlx")
    assert [work.name for work in chosen.works] == ["agent", "kill"]
    assert chosen.flags == {"ingot": ("--kv-codec", "k8v4", "--lazy"), "vllm-mlx": ("--a", "b c")}
    load = chosen.load_of(FORMS)
    assert (load.streams, load.rounds) == ((2, 4), 7)
    assert read_choice({"quick": True}).load_of(FORMS).course.tokens == 2500
    longer = Forms("m", None, Traits(200_000, True, False, False, False))
    assert read_choice({"long": True}).load_of(longer).course.tokens == 87_000


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"peers": "llama"}, "'llama' is none of"),
        ({"work": "agents"}, "'agents' is none of"),
        ({"streams": "0"}, "--streams"),
        ({"rounds": "x"}, "--rounds"),
        ({"flags": ["vllm-mlx"]}, "is not NAME='FLAGS'"),
        ({"flags": ["nobody=--a"]}, "'nobody' is none of"),
        ({"flags": ["ingot='a"]}, "--flags: .*quotation"),
        ({"quick": True, "long": True}, "--quick and --long"),
        ({"gguf": Path("nowhere.gguf")}, "--gguf: there is no file nowhere.gguf"),
        ({"report": Path(__file__) / "report"}, "--report: "),
    ],
)
def test_wrong_flags_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_choice(flags)


def test_where_no_peer_is_found_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "find_program", lambda peer: None)
    with pytest.raises(ConfigError, match="none of these servers is here"):
        run_bench(["peers", "--peers", "ollama,vllm-mlx"])
    said = capsys.readouterr().out
    assert "ollama: not found; get it from https://ollama.com/download" in said
    assert "vllm-mlx: not found; `--install` installs it" in said


def test_a_server_gets_the_form_of_the_model_that_it_loads() -> None:
    assert FORMS.of(INGOT, endless=True) == Path("own")
    assert FORMS.of(find_peer("mlx_lm.server"), endless=False) == Path("mlx")
    with pytest.raises(ConfigError, match="--gguf"):
        FORMS.of(find_peer("llama-server"), endless=True)
    assert Forms("m", Path("m.gguf"), TRAITS).of(find_peer("llama-server"), endless=True) == Path("m.gguf")


def test_traits_are_read_from_a_models_files() -> None:
    found = {name: read_traits(MODELS / name) for name in ("dense", "hybrid", "vision")}
    assert found["hybrid"] == Traits(4352, tools=True, vision=False, hybrid=True, draft_head=True)
    assert found["vision"].vision and not found["dense"].vision
    assert not found["dense"].hybrid and not found["dense"].draft_head


def test_a_twin_without_end_tokens_is_otherwise_the_same(tmp_path: Path) -> None:
    twin = write_twin(MODELS / "hybrid", tmp_path / "twin", ends=False)
    config = json.loads((twin / "config.json").read_text())
    assert "eos_token_id" not in config["text_config"] and not (twin / "generation_config.json").exists()
    assert "eos_token" not in json.loads((twin / "tokenizer_config.json").read_text())
    assert (twin / "model.safetensors").resolve() == (MODELS / "hybrid" / "model.safetensors").resolve()
    same = write_twin(MODELS / "hybrid", tmp_path / "same", ends=True)
    assert {file.name for file in same.iterdir()} == {file.name for file in (MODELS / "hybrid").iterdir()}


def test_a_dense_copy_has_the_vision_tower_under_the_names_that_its_servers_know(tmp_path: Path) -> None:
    write_dense(MODELS / "vision", tmp_path / "dense")
    (before, _), (after, about) = (
        mx.load(str(folder / "model.safetensors"), return_metadata=True)
        for folder in (MODELS / "vision", tmp_path / "dense")
    )
    assert after.keys() == before.keys() and any("visual" in name for name in after)
    assert {array.dtype for array in after.values()} == {mx.float32} and about["format"] == "pt"
    assert (tmp_path / "dense" / "preprocessor_config.json").is_file()


def test_a_dense_copy_of_packed_weights_has_their_values(tmp_path: Path) -> None:
    source = tmp_path / "packed"
    source.mkdir()
    weights: dict[str, mx.array] = {"norm.weight": mx.ones(4, mx.float16), "steps": mx.arange(3)}
    packing: dict[str, Any] = {"group_size": 32, "bits": 4, "b": {"group_size": 64, "bits": 8}}
    values = {}
    for name, form in (("a", (32, 4)), ("b", (64, 8))):
        parts = mx.quantize(mx.random.normal((8, 128), key=mx.random.key(len(values))), *form)
        weights |= {f"{name}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts, strict=True)}
        values[f"{name}.weight"] = mx.dequantize(*parts, *form)
    mx.save_safetensors(str(source / "model.safetensors"), weights, {"format": "mlx"})
    (source / "config.json").write_text(json.dumps({"quantization": packing, "quantization_config": packing, "x": 1}))
    write_dense(source, tmp_path / "dense")
    found = mx.load(str(tmp_path / "dense" / "model.safetensors"))
    assert found.keys() == {"a.weight", "b.weight", "norm.weight", "steps"}
    assert all(mx.array_equal(found[name], value) for name, value in values.items())
    assert found["norm.weight"].dtype == mx.float32 and found["steps"].dtype == mx.int32
    assert json.loads((tmp_path / "dense" / "config.json").read_text()) == {"x": 1}


def test_the_process_that_measures_does_without_mlx() -> None:
    script = f"import sys, {command.__name__}; assert not {{'mlx', 'mlx.core', 'mlx_lm'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def test_nothing_of_what_measures_lengths_is_cached_when_the_work_begins() -> None:
    bodies: list[dict[str, Any]] = []

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return {"usage": {"prompt_tokens": len(json.dumps(body)) // 4}}

    ours: Any = SimpleNamespace(client=SimpleNamespace(post=post), ask=lambda body: body)
    load = command._calibrated(read_choice({}).load_of(FORMS), ours, FORMS)
    assert load.session.padding > 0
    assert len(bodies) > 3 and {body["cache"] for body in bodies} == {"off"}


def test_a_report_of_an_interrupted_run_names_the_peers_whose_turn_did_not_come() -> None:
    measured, begun = Match("mlx_lm.server"), Match("vllm-mlx")
    measured.figure("agent", "next turn").found[0][0] = 1.0
    report = Report("m", [], Load(TRAITS), [], [measured, begun], [], [("omlx", "runs on macOS alone")])
    command._note_unmeasured(report, ["mlx_lm.server", "vllm-mlx", "rapid-mlx"])
    assert report.matches == [measured]
    assert [name for name, why in report.absent if "interrupted" in why] == ["vllm-mlx", "rapid-mlx"]


def test_a_process_told_to_end_leaves_its_blocks_and_has_its_own_handler_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), command._ending_with_its_servers():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_ingot_beside_itself_does_all_the_work(tmp_path: Path) -> None:
    command = [PROGRAM, "bench", "peers", str(MODELS / "hybrid"), "--peers", "ingot", "--quick", "--streams", "1,2"]
    done = subprocess.run(
        [*command, "--report", str(tmp_path / "report")],
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    (match,) = found["matches"]
    assert [(each["work"], each["kind"]) for each in match["troubles"]] == [("images", "not supported")] * 2
    figures = {(each["work"], each["figure"]): each for each in match["figures"]}
    assert {work for work, _ in figures} == {*WORK_NAMES} - {"images"}
    for name in (("structured", "valid JSON"), ("calls", "valid calls"), ("overload", "answered")):
        for side in ("ours", "theirs"):
            assert set(figures[name][side].values()) == {1.0}, name
    assert min(figures["agent", "reused"]["ours"].values()) > 0.9
    assert min(figures["restart", "cached after a restart"]["ours"].values()) > 0.9
    assert figures["streams", "2 at once: tokens/s"]["ratio"] > 0


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "it did not start\n  File x\nModuleNotFoundError: no y\n\nERROR:    startup failed.",
            "ModuleNotFoundError: no y",
        ),
        ("it did not start\nport in use\nbye", "bye"),
        ("it did not start", ""),
    ],
)
def test_why_a_peer_did_not_start_is_its_last_exception_in_one_line(log: str, reason: str) -> None:
    assert short_reason(log) == f"it did not start {reason}".strip()

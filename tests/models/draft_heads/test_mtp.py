"""A head that predicts nearly nothing is refused when it is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.errors import ModelError
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head, refuse_unknown_head
from ingot.models.draft_heads.mtp import (
    MOST_REQUIRED,
    MtpHead,
    break_even_acceptance,
    check_draft_head,
    draft_head_rows,
    load_mtp_head,
)
from ingot.models.probe import logits_gap
from tests.engines import GPU
from tests.launches import prompt_logits
from tests.models.draft_heads.making import (
    FAMILIES,
    Made,
    Tensors,
    differences,
    in_eight_bits,
    make,
    named,
    packed,
    write,
    write_shards,
)
from tests.models.draft_heads.test_hybrid import HYBRID


def noisy(tensors: Tensors, much: float) -> Tensors:
    """With noise so many times as large as weights are, as rounding to few bits leaves it."""
    mx.random.seed(0)
    return {
        name: array + much * mx.std(array) * mx.random.normal(array.shape, array.dtype) if array.ndim > 1 else array
        for name, array in tensors.items()
    }


def drowned(tensors: Tensors) -> Tensors:
    return noisy(tensors, 4.0)


def blurred(tensors: Tensors) -> Tensors:
    """It predicts a tenth, which is more than nothing and too little to pay."""
    return noisy(tensors, 1.0)


def mistaken(tensors: Tensors) -> Tensors:
    """The hidden state where the embedding belongs."""
    embedded, hidden = mx.split(tensors["mtp.fc.weight"], 2, axis=1)
    return {**tensors, "mtp.fc.weight": mx.concatenate([hidden, embedded], axis=1)}


def checked(folder: Path, device: Device | None = None) -> float:
    adapter = load_model_adapter(folder, device or current_device())
    source = find_head(folder, adapter.config)
    assert source is not None
    return check_draft_head(load_mtp_head(source, adapter), adapter)


@pytest.mark.parametrize(
    "device", [pytest.param(None, id="here"), pytest.param(GPU, id="as-on-a-gpu", marks=pytest.mark.slow)]
)
def test_a_trained_head_predicts_much_of_what_its_model_generates(device: Device | None) -> None:
    assert checked(HYBRID, device) > 0.4


@pytest.mark.parametrize("changed", [drowned, blurred, mistaken])
def test_a_head_that_predicts_next_to_nothing_is_refused_with_the_reason(
    changed: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    folder = tmp_path / "hybrid"
    shutil.copytree(HYBRID, folder)
    stored = mx.load(str(HYBRID / "model.safetensors"))
    assert isinstance(stored, dict)
    head = {name: array for name, array in stored.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "mtp.safetensors"), changed(head))
    with pytest.raises(ModelError, match=r"predicts 1?\d% of 48 tokens .* below \d\d% .* made from quantised weights"):
        checked(folder)


def test_what_is_asked_of_a_head_is_what_reading_it_and_verifying_cost_at_the_best_of_cases() -> None:
    assert 0.06 < break_even_acceptance(849, 54_000) < 0.07  # a bfloat16 head and model of 27B
    assert 0.10 < break_even_acceptance(849, 14_000) < 0.12  # the same head beside weights of four bits
    assert break_even_acceptance(1, 1) == MOST_REQUIRED


TOKENS = [5, 17, 3, 29, 11, 23, 7, 19, 2, 13, 31, 8]
CLOSE = 2e-2
"""Of states' range: keys and values are rounded to 16 bits, and so are products on CPUs."""


def loaded(folder: Path, device: Device | None = None) -> tuple[ModelAdapter, MtpHead]:
    adapter = load_model_adapter(folder, device or current_device())
    source = find_head(folder, adapter.config)
    assert source is not None
    return adapter, load_mtp_head(source, adapter)


def hidden_of(adapter: ModelAdapter, tokens: Sequence[int] = TOKENS) -> mx.array:
    rows = adapter.new_batch_state()
    _, hidden = adapter.run(rows, mx.array(list(tokens)), [ForwardPart((rows.new(),), len(tokens))], [0], hidden=True)
    return hidden


def run_head(
    head: MtpHead, rows: BatchState, parts: Sequence[ForwardPart], hidden: mx.array, tokens: Sequence[int]
) -> mx.array:
    with rows.launch(parts) as layers:
        states = head(hidden[None], mx.array(list(tokens))[None], layers[0])
    mx.eval(states, rows.pending())
    return states[0]


def check(made: Made, adapter: ModelAdapter, head: MtpHead) -> None:
    """The head gives what mlx-lm's own layers give, for the whole prompt at once."""
    hidden, rows = hidden_of(adapter), draft_head_rows(head, adapter)
    found = run_head(head, rows, [ForwardPart((rows.new(),), len(TOKENS) - 1)], hidden[:-1], TOKENS[1:])
    expected = made.expected(hidden[None, :-1].astype(mx.float32), mx.array([TOKENS[1:]]))[0]
    assert logits_gap(found, expected) < CLOSE
    if "output" in made.others:
        assert logits_gap(head.logits(found), made.expected_logits(expected)) < CLOSE


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest) -> Made:
    return make(request.param)


@pytest.fixture(scope="module")
def qwen() -> Made:
    return make("qwen3_5")


@pytest.mark.parametrize("device", [None, GPU], ids=["here", "as-on-a-gpu"])
def test_a_head_among_the_models_own_tensors_computes_what_its_layers_do(
    made: Made, device: Device | None, tmp_path: Path
) -> None:
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made)}})
    check(made, *loaded(tmp_path, device))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", ["model-mtp.safetensors", "mtp.safetensors", "mtp/model.safetensors"])
@pytest.mark.parametrize("bare", [False, True], ids=["named", "bare"])
def test_a_head_in_a_file_beside_the_model_is_found_whatever_its_names_begin_with(
    made: Made, place: str, bare: bool, tmp_path: Path
) -> None:
    tensors = made.head if bare else named(made)
    write(tmp_path, made.config, files={"model.safetensors": made.base, place: tensors})
    check(made, *loaded(tmp_path))


def test_a_file_beside_the_model_goes_before_what_lies_among_its_tensors(qwen: Made, tmp_path: Path) -> None:
    spoilt = {name: mx.zeros_like(array) for name, array in named(qwen).items()}
    own = {**qwen.base, **spoilt}
    write(tmp_path, qwen.config, files={"model.safetensors": own, "mtp.safetensors": named(qwen)})
    check(qwen, *loaded(tmp_path))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 32)])
def test_a_packed_head_beside_a_plain_model_is_unpacked_by_its_own_shapes(
    qwen: Made, bits: int, group_size: int, tmp_path: Path
) -> None:
    tensors = packed(qwen.head, bits, group_size)
    write(tmp_path, qwen.config, files={"model.safetensors": qwen.base, "mtp.safetensors": tensors})
    _, head = loaded(tmp_path)
    exact = mx.dequantize(*(tensors[f"fc.{part}"] for part in ("weight", "scales", "biases")), group_size, bits)
    x = mx.random.normal((1, 3, exact.shape[1]))
    assert logits_gap(head.joint(x), x @ exact.T) < CLOSE


@pytest.mark.parametrize("lost", ["fc.scales", "fc.biases"])
def test_packed_weights_that_lack_what_unpacks_them_are_refused(qwen: Made, lost: str, tmp_path: Path) -> None:
    tensors = {name: array for name, array in packed(qwen.head).items() if name != lost}
    write(tmp_path, qwen.config, files={"model.safetensors": qwen.base, "mtp.safetensors": tensors})
    with pytest.raises(ModelError, match=r"lack scales or biases: joint"):
        loaded(tmp_path)


def published(made: Made) -> Tensors:
    """A hybrid's tensors before any conversion: norms less one, convolutions by channels."""
    shifted = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
    result = {}
    for name, array in made.base.items():
        less = any(name.endswith(f"{norm}.weight") for norm in shifted)
        result[name] = array.moveaxis(1, 2) if "conv1d" in name else array - 1 if less else array
    return result


@pytest.mark.parametrize("stored", ["published", "converted", "joined"])
def test_norms_are_shifted_once_or_not_at_all(qwen: Made, stored: str, tmp_path: Path) -> None:
    base = published(qwen) if stored == "published" else qwen.base
    head = qwen.head if stored == "converted" else differences(qwen.head)
    write(tmp_path, qwen.config, files={"model.safetensors": {**base, **named(qwen, head)}})
    check(qwen, *loaded(tmp_path))


@pytest.mark.parametrize("spoilt", [-3.0, 1000.0, float("nan")])
def test_norms_that_fit_neither_form_are_refused(qwen: Made, spoilt: float, tmp_path: Path) -> None:
    head = {name: mx.full(array.shape, spoilt) if "norm" in name else array for name, array in qwen.head.items()}
    write(tmp_path, qwen.config, files={"model.safetensors": qwen.base, "mtp.safetensors": head})
    with pytest.raises(ModelError, match="neither factors nor differences from one"):
        loaded(tmp_path)


def test_a_head_without_a_tensor_is_refused_by_that_tensors_name(made: Made, tmp_path: Path) -> None:
    lost = f"{made.wiring.hidden_norm}.weight"
    head = {name: array for name, array in made.head.items() if name != lost}
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made, head)}})
    with pytest.raises(ModelError, match=r"head in .* missing: hidden_norm\.weight"):
        loaded(tmp_path)


def test_a_head_of_another_size_is_refused_with_both_shapes(qwen: Made, tmp_path: Path) -> None:
    head = {**qwen.head, "fc.weight": mx.zeros((32, 32))}
    write(tmp_path, qwen.config, files={"model.safetensors": {**qwen.base, **named(qwen, head)}})
    with pytest.raises(ModelError, match=r"joint\.weight \(32, 32\) instead of \(32, 64\)"):
        loaded(tmp_path)


def test_a_tensor_that_no_head_has_is_refused(qwen: Made, tmp_path: Path) -> None:
    head = {**qwen.head, "layers.0.self_attn.sinks": mx.zeros(4)}
    write(tmp_path, qwen.config, files={"model.safetensors": {**qwen.base, **named(qwen, head)}})
    with pytest.raises(ModelError, match=r"unknown: layers\.0\.self_attn\.sinks"):
        loaded(tmp_path)


def test_only_shards_that_hold_the_head_are_opened(tmp_path: Path) -> None:
    made = make("glm4_moe")
    shards = {"model-00001-of-00002.safetensors": made.base, "model-00002-of-00002.safetensors": named(made)}
    write_shards(tmp_path, made.config, shards)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    source = find_head(tmp_path, made.config)
    assert source is not None
    assert [file.name for file in source.files] == ["model-00002-of-00002.safetensors"]
    assert source.nbytes == sum(array.nbytes for array in made.head.values())


def test_an_index_that_does_not_say_what_the_files_hold_is_refused(qwen: Made, tmp_path: Path) -> None:
    write_shards(tmp_path, qwen.config, {"model-1.safetensors": qwen.base, "model-2.safetensors": named(qwen)})
    mx.save_safetensors(str(tmp_path / "model-2.safetensors"), {"other": mx.zeros(1)})
    with pytest.raises(ModelError, match=r"model-2\.safetensors lacks mtp\."):
        find_head(tmp_path, qwen.config)


@pytest.mark.parametrize("raw", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../b"}}'])
def test_an_index_that_is_none_is_refused(qwen: Made, raw: str, tmp_path: Path) -> None:
    write(tmp_path, qwen.config, files={"model.safetensors": qwen.base})
    (tmp_path / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(ModelError, match="not the index of a checkpoint"):
        find_head(tmp_path, qwen.config)


def test_a_head_is_known_by_its_tensors_and_not_by_what_a_config_says(qwen: Made, tmp_path: Path) -> None:
    claims: dict[str, Any] = {**qwen.config, "mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    write(tmp_path, claims, files={"model.safetensors": qwen.base})
    assert find_head(tmp_path, claims) is None
    denies = {**qwen.config, "mtp_num_hidden_layers": 0}
    write(tmp_path, denies, files={"model.safetensors": {**qwen.base, **named(qwen)}})
    assert find_head(tmp_path, denies) is not None


@pytest.mark.parametrize("device", [None, GPU], ids=["here", "as-on-a-gpu"])
def test_a_head_runs_in_mixed_launches_of_rows_unlike_each_other(
    made: Made, device: Device | None, tmp_path: Path
) -> None:
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made)}})
    adapter, head = loaded(tmp_path, device)
    hidden = hidden_of(adapter)
    whole = made.expected(hidden[None, :-1].astype(mx.float32), mx.array([TOKENS[1:]]))[0]
    short = made.expected(hidden[None, :4].astype(mx.float32), mx.array([TOKENS[1:5]]))[0]
    rows = draft_head_rows(head, adapter)
    one, two = rows.new(), rows.new()

    def step(spans: list[tuple[Row, int, int]]) -> mx.array:
        parts = [ForwardPart((row,), end - begin) for row, begin, end in spans]
        states = mx.concatenate([hidden[begin:end] for _, begin, end in spans])
        return run_head(head, rows, parts, states, [t for _, begin, end in spans for t in TOKENS[begin + 1 : end + 1]])

    first = step([(one, 0, 5), (two, 0, 2)])
    second = step([(one, 5, 6), (two, 2, 4)])
    third = step([(one, 6, 11)])
    assert logits_gap(mx.concatenate([first[:5], second[:1], third]), whole) < CLOSE
    assert logits_gap(mx.concatenate([first[5:], second[1:]]), short) < CLOSE


def test_logits_of_a_head_are_those_of_the_models_output_head(made: Made, tmp_path: Path) -> None:
    if made.wiring.output is not None:
        pytest.skip("it has one of its own, which is compared where states are")
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made)}})
    adapter, head = loaded(tmp_path)
    rows = adapter.new_batch_state()
    logits, hidden = adapter.run(rows, mx.array(TOKENS), [ForwardPart((rows.new(),), len(TOKENS))], hidden=True)
    assert logits_gap(head.logits(hidden), logits) < CLOSE
    assert head.weight_bytes > 0


def test_a_model_whose_head_mlx_lms_own_code_trips_over_still_loads(tmp_path: Path) -> None:
    made = make("qwen3_next")
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made)}})
    assert load_model_adapter(tmp_path, current_device()).vocab == 96


def test_on_a_gpu_a_head_computes_in_the_models_format(qwen: Made, tmp_path: Path) -> None:
    narrow = {name: array.astype(mx.bfloat16) for name, array in qwen.base.items()}
    head = {name: array.astype(mx.float16) for name, array in qwen.head.items()}
    write(tmp_path, qwen.config, files={"model.safetensors": narrow, "mtp.safetensors": head})
    adapter, made = loaded(tmp_path, GPU)
    hidden, rows = hidden_of(adapter), draft_head_rows(made, adapter)
    found = run_head(made, rows, [ForwardPart((rows.new(),), len(TOKENS))], hidden, TOKENS)
    assert (hidden.dtype, found.dtype) == (mx.bfloat16, mx.bfloat16)


def test_what_mlx_lm_leaves_as_it_is_stored_stays_so_in_a_head(tmp_path: Path) -> None:
    made, bias = make("glm4_moe"), "mlp.gate.e_score_correction_bias"
    head = {name: array.astype(mx.bfloat16 if name == bias else mx.float16) for name, array in made.head.items()}
    write(tmp_path, made.config, files={"model.safetensors": made.base, "mtp.safetensors": head})
    gate = loaded(tmp_path, GPU)[1].layers[0].mlp.gate
    assert (gate.weight.dtype, gate.e_score_correction_bias.dtype) == (mx.float32, mx.bfloat16)


def test_a_head_that_wants_hidden_states_before_the_last_norm_is_handed_those(qwen: Made, tmp_path: Path) -> None:
    write(tmp_path, qwen.config, files={"model.safetensors": {**qwen.base, **named(qwen)}})
    adapter = load_model_adapter(tmp_path, current_device())
    normed = hidden_of(adapter)
    source = find_head(tmp_path, adapter.config)
    assert source is not None
    load_mtp_head(replace(source, wiring=replace(source.wiring, wants="raw")), adapter)
    raw = hidden_of(adapter)
    norm = adapter.model.language_model.model.norm
    assert logits_gap(norm(raw), normed) < 1e-5
    assert logits_gap(raw, normed) > 0.1


def test_a_pass_that_nobody_asks_hidden_states_of_keeps_none(qwen: Made, tmp_path: Path) -> None:
    write(tmp_path, qwen.config, files={"model.safetensors": {**qwen.base, **named(qwen)}})
    adapter, _ = loaded(tmp_path)
    selection = adapter.selection
    assert selection is not None
    hidden_of(adapter)
    prompt_logits(adapter, TOKENS)
    assert selection.hidden is None
    assert not selection.captures_hidden


def test_hidden_states_of_a_mixed_pass_stand_in_the_order_of_its_tokens(qwen: Made, tmp_path: Path) -> None:
    write(tmp_path, qwen.config, files={"model.safetensors": qwen.base})
    adapter = load_model_adapter(tmp_path, current_device())
    rows = adapter.new_batch_state()
    parts = [ForwardPart((rows.new(),), 7), ForwardPart((rows.new(),), 4)]
    logits, hidden = adapter.run(rows, mx.array([*TOKENS[:7], *TOKENS[:4]]), parts, [6, 10], hidden=True)
    assert (logits.shape[0], hidden.shape[0]) == (2, 11)
    assert logits_gap(hidden[:7], hidden_of(adapter, TOKENS[:7])) < CLOSE
    assert logits_gap(hidden[7:], hidden_of(adapter, TOKENS[:4])) < CLOSE


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_of_several_heads_one_behind_another_the_first_is_taken_and_the_model_loads(
    family: str, tmp_path: Path
) -> None:
    made = make(family)
    layers = made.config["num_hidden_layers"]
    second = {f"model.layers.{layers + 1}.{name}": mx.zeros_like(array) for name, array in made.head.items()}
    write(tmp_path, made.config, files={"model.safetensors": {**made.base, **named(made), **second}})
    check(made, *loaded(tmp_path))


def test_a_head_published_in_eight_bits_is_unpacked(tmp_path: Path) -> None:
    made = make("deepseek_v3")
    stored, meant = in_eight_bits(made.head)
    outcomes = []
    for name, head in (("stored", stored), ("meant", meant)):
        files = {"model.safetensors": {**made.base, **named(made, head)}}
        adapter, found = loaded(write(tmp_path / name, made.config, files=files))
        hidden, rows = hidden_of(adapter), draft_head_rows(found, adapter)
        outcomes.append(run_head(found, rows, [ForwardPart((rows.new(),), len(TOKENS))], hidden, TOKENS))
    assert logits_gap(*outcomes) < CLOSE


def test_a_file_of_another_kind_beside_a_model_is_no_head(qwen: Made, tmp_path: Path) -> None:
    write(tmp_path, qwen.config, files={"model.safetensors": {**qwen.base, **named(qwen)}})
    (tmp_path / "mtp").write_text("not a folder, nor tensors")
    check(qwen, *loaded(tmp_path))


@pytest.mark.parametrize("family", ["longcat_flash", "exaone_moe", "mimo_v2"])
@pytest.mark.parametrize("name", ["model.mtp.layers.0.eh_proj.weight", "mtp.fc.weight", "model.layers.9.enorm.weight"])
def test_a_head_of_a_family_whose_heads_are_not_known_is_refused_by_name(
    family: str, name: str, tmp_path: Path
) -> None:
    tensors, config = {"model.norm.weight": mx.ones(4)}, {"model_type": family}
    write(tmp_path / "without", config, files={"model.safetensors": tensors})
    refuse_unknown_head(tmp_path / "without", config)
    write(tmp_path / "with", config, files={"model.safetensors": {**tensors, name: mx.ones(4)}})
    assert find_head(tmp_path / "with", config) is None
    with pytest.raises(ModelError, match=rf"with has a draft head \({name}\), but heads of {family} are not supported"):
        refuse_unknown_head(tmp_path / "with", config)

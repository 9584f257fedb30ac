"""Mixtures whose experts are read when they are needed give the same bits as with all of them in memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ingot.errors import ConfigError, ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.experts import streaming
from ingot.models.experts.files import READERS, ExpertRead, WeightsUnreadable, read_bytes
from ingot.models.experts.guessing import FEW_TOKENS, TRIAL_INTERVAL, TRIAL_PASSES, GuessTrial
from ingot.models.experts.slots import NOWHERE
from ingot.models.experts.streaming import ExpertStore, LayerExperts
from ingot.models.layers.decode_graph import decode_graphs_of
from ingot.models.layers.moe import JoinedMoe
from tests.kernels.gpu.host_copies import host_copies
from tests.launches import computed, decoded, prompt_logits
from tests.models.experts.mixtures import IN_GRAPHS, PACKINGS, PROMPT, loaded, saved, store_of
from tests.one_path import one_path

__all__ = ["one_path"]
pytestmark = pytest.mark.usefixtures("rules")

CASES = [
    *(("qwen3_moe", packing) for packing in PACKINGS),
    *(("qwen3_5_moe", "4 bits"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "4 bits"), ("glm4_moe", "32 bits")),
    *(("nemotron_h", "8 bits"), ("mixtral", "4 bits"), ("olmoe", "32 bits")),
    *(("gemma4_text", "4 bits"), ("granitemoehybrid", "4 bits")),
]


def reference(folder: Path, rules: str) -> ModelAdapter:
    """With all experts in memory. On CUDA, where decode graphs have no kernels for those that are read when they are
    needed, the others' sums have another order."""
    if rules != "cuda":
        return loaded(folder)
    streamed = loaded(folder, 2.0, always=True)
    stack = decode_graphs_of(streamed.model)
    return loaded(folder) if stack is not None and stack.refusal is None else streamed


def all_logits(adapter: ModelAdapter) -> list[mx.array]:
    """Of a prompt, of decode steps of two rows, and of the prompt again."""
    rows = adapter.new_batch_state()
    live = [rows.new(), rows.new()]
    found = [computed(adapter, rows, row, PROMPT[:count]) for row, count in zip(live, (12, 5), strict=True)]
    for step in range(3):
        batches = [live] if adapter.ragged else [[row] for row in live]
        found += [decoded(adapter, rows, batch, [step + 5 + 3 * i for i, _ in enumerate(batch)]) for batch in batches]
    return [*found, prompt_logits(adapter, PROMPT)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "packing"), CASES)
def test_answers_are_those_of_the_model_in_memory(family: str, packing: str, rules: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path, PACKINGS[packing], **IN_GRAPHS)
    whole = all_logits(reference(folder, rules))
    for share in (0.4, 0.7):
        adapter = loaded(folder, share)
        assert all(mx.array_equal(*pair) for pair in zip(all_logits(adapter), whole, strict=True))
        store = store_of(adapter)
        store.check()
        assert store.stats.misses and store.stats.bytes_read
        adapter.close()


def test_on_nvidia_gpus_few_tokens_of_layers_that_are_no_graphs_are_launched_by_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    folder = saved("deepseek_v3", tmp_path, PACKINGS["4 bits"])
    adapter, found = loaded(folder, 0.7), []
    mixtures = [each for each in adapter.model.modules() if isinstance(each, JoinedMoe)]
    assert mixtures and all(each.streamed is not None and each.kernels is None for each in mixtures)
    assert decode_graphs_of(adapter.model) is None
    for each in (adapter, loaded(folder)):
        rows = each.new_batch_state()
        row = rows.new()
        found.append([computed(each, rows, row, PROMPT[:3]), *(decoded(each, rows, [row], [t]) for t in (5, 8))])
    for ours, whole in zip(*found, strict=True):
        assert mx.abs(ours - whole).max() < 0.05 * mx.abs(whole).max()


class Waits:
    """How often the host asks for something to be computed, and how often it waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = self.waits = 0
        evaluate, launch = mx.eval, mx.async_eval

        def counted_eval(*arrays: object) -> None:
            self.waits += 1
            evaluate(*arrays)

        def counted_launch(*arrays: object) -> None:
            self.launches += 1
            launch(*arrays)

        monkeypatch.setattr(streaming.mx, "eval", counted_eval)
        monkeypatch.setattr(streaming.mx, "async_eval", counted_launch)


def layer_of(share: float, folder: Path, **options: object) -> LayerExperts:
    """The second of two, which was used."""
    adapter = loaded(folder, share, read_ahead=False, **options)
    prompt_logits(adapter, PROMPT)
    return store_of(adapter).layers[1]


def product_of(layer: LayerExperts, experts: Sequence[int]) -> mx.array:
    products = layer._products
    assert products is not None
    return layer.compute(mx.ones((1, 1, 64)), mx.array([[[*experts]]], mx.uint32), products, products)


def some_of(layer: LayerExperts, *, there: bool) -> list[int]:
    """Two experts that are in memory, or one that is and one that is not."""
    present, absent = (np.flatnonzero((layer.slots.slot_of == NOWHERE) == away).tolist() for away in (False, True))
    return present[:2] if there else [present[0], absent[0]]


def test_the_host_waits_once_for_a_layer_whose_experts_are_all_there(
    rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(0.7, saved("qwen3_moe", tmp_path))
    experts, counted = some_of(layer, there=True), Waits(monkeypatch)
    product_of(layer, experts)
    assert (counted.waits, counted.launches) == (1, 2)


def test_the_host_does_not_wait_for_a_layer_whose_experts_all_have_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(2.0, saved("qwen3_moe", tmp_path), always=True)
    assert layer.slots.is_complete
    counted = Waits(monkeypatch)
    product_of(layer, range(2))
    assert (counted.waits, counted.launches) == (0, 0)


def test_products_that_were_launched_without_an_expert_are_launched_again(
    rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(0.7, saved("qwen3_moe", tmp_path))
    layer._all_there, written = 1.0, []
    experts, submit = some_of(layer, there=False), layer._store.readers.submit

    def submitted(reads: Iterable[ExpertRead]) -> None:
        written.append(layer._output)  # what reads slots was evaluated before
        submit(reads)

    monkeypatch.setattr(layer._store.readers, "submit", submitted)
    counted = Waits(monkeypatch)
    found = product_of(layer, experts)
    assert written == [None]
    assert counted.launches == (2 if rules == "cpu" else 3)
    again = product_of(layer, experts)
    assert mx.array_equal(found, again)
    layer._all_there = 0.0  # where an expert is mostly missing, nothing is launched early
    counted.launches = 0
    product_of(layer, some_of(layer, there=False))
    assert counted.launches == 2


@pytest.mark.parametrize("past_cache", [False, True])
def test_on_a_device_with_memory_of_its_own_experts_are_copied_there(
    past_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    folder = saved("qwen3_moe", tmp_path, PACKINGS["4 bits"], **IN_GRAPHS)
    whole = all_logits(loaded(folder))
    monkeypatch.setattr("ingot.models.experts.loading.find_device_copies", lambda device: host_copies())
    adapter = loaded(folder, 0.4, past_cache=past_cache)
    assert all(mx.array_equal(*pair) for pair in zip(all_logits(adapter), whole, strict=True))
    assert store_of(adapter).copies is not None and store_of(adapter).stats.misses
    adapter.close()


@pytest.mark.parametrize("packing", PACKINGS)
def test_reads_past_the_page_cache_bring_the_same_experts(packing: str, tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path, PACKINGS[packing])
    adapter, whole = loaded(folder, 0.4, past_cache=True), loaded(folder, 2.0, always=True)
    assert mx.array_equal(prompt_logits(adapter, PROMPT), prompt_logits(whole, PROMPT))
    assert store_of(adapter).stats.misses
    adapter.close()


def test_what_the_next_layer_needs_is_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuessTrial, "begin_pass", lambda trial, tokens: None)
    folder = saved("qwen3_moe", tmp_path, calm=True)
    found = []
    for read_ahead in (True, False):
        adapter = loaded(folder, 0.9, read_ahead=read_ahead)  # the first layer's are all there
        before = store_of(adapter).stats
        for token in range(0, 90, 5):
            prompt_logits(adapter, [token])
        found.append(store_of(adapter).stats.since(before))
    ahead, behind = found
    assert behind.predicted == 0
    assert ahead.predicted > ahead.misses
    assert ahead.misses < behind.misses


def test_the_first_layers_experts_which_nobody_guesses_are_all_in_memory(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    found = [[layer.slots.count for layer in store_of(loaded(folder, share)).layers] for share in (0.6, 0.9)]
    assert found == [[4, 4], [8, 6]]  # unless that leaves the others too few


def test_experts_of_wrong_guesses_leave_what_is_in_their_slots_where_nothing_was_written(tmp_path: Path) -> None:
    adapter = loaded(saved("qwen3_moe", tmp_path, PACKINGS["4 bits"]), 0.7)
    prompt_logits(adapter, PROMPT)
    readers, layer = store_of(adapter).readers, store_of(adapter).layers[1]
    before = layer.slots.expert_in.copy()
    readers.most = 0  # none begins
    lacking = np.flatnonzero(layer.slots.slot_of == NOWHERE)
    layer.read_ahead(lacking[None])
    assert layer._arriving and all(each.victim is not None for each in layer._arriving.values())
    layer._call_off_wrong(set())
    assert not layer._arriving
    assert (layer.slots.expert_in == before).all()
    readers.most = READERS
    adapter.close()


def test_more_experts_than_slots_are_computed_in_rounds(tmp_path: Path) -> None:
    adapter = loaded(saved("qwen3_moe", tmp_path), 0.3)
    before = store_of(adapter).stats
    prompt_logits(adapter, PROMPT)
    found = store_of(adapter).stats.since(before)
    assert found.rounds > 0
    # Each expert is read once a chunk at most.
    assert found.misses + found.predicted + found.wasted <= 2 * 8 * len(store_of(adapter).layers)


@pytest.mark.parametrize(
    ("past_cache", "said"), [(True, "3.0 GB/s"), (False, "3.0 GB/s, and more once the system's memory has the files")]
)
def test_the_expected_speed_is_that_of_the_drive_and_names_the_page_cache_where_it_is_used(
    past_cache: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertStore, "drive_speed", lambda store: 3e9)
    adapter = loaded(saved("qwen3_moe", tmp_path), 0.7, past_cache=past_cache)
    [note] = [note for note in adapter.notes if "expect" in note]
    assert note.endswith(f"at one stream, from a drive that reads {said}")


def test_a_mixture_that_fits_is_an_ordinary_model(tmp_path: Path) -> None:
    assert loaded(saved("qwen3_moe", tmp_path), 1.5).experts is None


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no mixture of experts"):
        loaded(saved("llama", tmp_path), 0.5)


def test_fewer_slots_than_a_token_has_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is room for 1 of a layer's experts, and a token has 2"):
        loaded(saved("qwen3_moe", tmp_path), 0.15)


def stored_otherwise(folder: Path, change: Callable[[str, dict[str, mx.array]], None]) -> None:
    """Store the experts of every layer in another form."""
    file = folder / "model.safetensors"
    tensors = dict(mx.load(str(file)).items())
    mx.eval(tensors)
    for block in sorted({name.partition(".switch_mlp.")[0] for name in tensors if ".switch_mlp." in name}):
        change(block, tensors)
    mx.save_safetensors(str(file), tensors)


def one_by_one(block: str, tensors: dict[str, mx.array]) -> None:
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for expert, weight in enumerate(tensors.pop(f"{block}.switch_mlp.{projection}.weight")):
            tensors[f"{block}.experts.{expert}.{projection}.weight"] = weight


def gates_with_ups(block: str, tensors: dict[str, mx.array]) -> None:
    gate, up, down = (tensors.pop(f"{block}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    tensors[f"{block}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
    tensors[f"{block}.experts.down_proj"] = down


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3_moe", one_by_one), ("qwen3_5_moe", gates_with_ups)], ids=["one by one", "joint"]
)
def test_experts_that_the_family_stacks_or_splits_are_read_from_where_they_lie(
    family: str, form: Callable[[str, dict[str, mx.array]], None], tmp_path: Path
) -> None:
    folder = saved(family, tmp_path)
    stored_otherwise(folder, form)
    adapter, whole = loaded(folder, 0.4), loaded(folder, 2.0, always=True)
    assert mx.array_equal(prompt_logits(adapter, PROMPT), prompt_logits(whole, PROMPT))
    assert store_of(adapter).stats.misses


def test_experts_in_another_form_are_refused_by_name(tmp_path: Path) -> None:
    def eight_bits(block: str, tensors: dict[str, mx.array]) -> None:
        one_by_one(block, tensors)
        for name in [name for name in tensors if name.startswith(f"{block}.experts.")]:
            tensors[name], tensors[f"{name}_scale_inv"] = mx.to_fp8(tensors[name]), mx.ones((1, 1))

    folder = saved("qwen3_moe", tmp_path)
    stored_otherwise(folder, eight_bits)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"stored in another form.*ingot convert"):
        loaded(folder, 0.5)


class Drive:
    """Reads as the operating system does, until it is told to fail."""

    def __init__(self) -> None:
        self.fault: Callable[[], int | None] = lambda: None
        self.reads = 0

    def __call__(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        count = self.fault()
        return read_bytes(descriptor, into, offset) if count is None else count


def no_drive() -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("fault", "said"), [(no_drive, "Input/output error"), (lambda: 0, "cut short")])
def test_a_read_that_fails_is_an_error_in_words_and_answers_stay_right(
    fault: Callable[[], int], said: str, tmp_path: Path
) -> None:
    folder, drive = saved("qwen3_moe", tmp_path), Drive()
    adapter, whole = loaded(folder, 0.4, read=drive), loaded(folder, 2.0, always=True)
    drive.fault = fault
    with pytest.raises(WeightsUnreadable, match=said):
        for token in range(90):
            prompt_logits(adapter, [token])
    drive.fault = lambda: None
    assert mx.array_equal(prompt_logits(adapter, PROMPT), prompt_logits(whole, PROMPT))
    store_of(adapter).check()


def test_a_file_that_was_changed_is_not_read_from(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    adapter = loaded(folder, 0.4)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(WeightsUnreadable, match=r"model\.safetensors was changed"):
        for token in range(90):
            prompt_logits(adapter, [token])


def test_a_drive_that_does_not_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drive, answers = saved("qwen3_moe", tmp_path), Drive(), threading.Event()
    adapter, whole = loaded(folder, 0.4, read=drive), loaded(folder, 2.0, always=True)
    others = []
    store_of(adapter).meanwhile = lambda: others.append("went on")
    drive.fault = lambda: answers.wait(60) and None
    monkeypatch.setattr("ingot.models.experts.streaming.LONGEST_WAIT_S", 0.0)
    with pytest.raises(WeightsUnreadable, match="has not answered"):
        for token in range(90):
            prompt_logits(adapter, [token])
    monkeypatch.setattr("ingot.models.experts.streaming.LONGEST_WAIT_S", 60.0)
    threading.Timer(0.2, answers.set).start()
    assert mx.array_equal(prompt_logits(adapter, PROMPT), prompt_logits(whole, PROMPT))
    assert others


@pytest.mark.parametrize(("with_guesses", "without", "pays"), [(2.0, 3.0, True), (3.0, 2.0, False), (2.0, 2.0, False)])
def test_guesses_are_made_where_passes_were_measured_to_be_faster_with_them(
    with_guesses: float, without: float, pays: bool
) -> None:
    now = 0.0
    trial = GuessTrial(lambda: now)
    for number in range(1 + 2 * TRIAL_PASSES):
        trial.begin_pass(1)
        cold = max(0, TRIAL_PASSES - number)  # at first most experts have to be read
        now += cold + (100.0 if number == 3 else with_guesses if trial.guesses else without)  # it is idle at times
    assert trial.guesses == pays
    for _ in range(TRIAL_INTERVAL - 1):
        trial.begin_pass(1)
        assert trial.guesses == pays
    trial.begin_pass(1)
    assert trial.guesses  # and another trial begins
    trial.begin_pass(FEW_TOKENS + 1)
    assert not trial.guesses  # in turns
    for _ in range(3 * TRIAL_PASSES):
        trial.begin_pass(FEW_TOKENS + 1)  # a prompt's passes say nothing
    assert not trial.guesses

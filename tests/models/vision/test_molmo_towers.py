"""Molmo by its makers' names and configs, and the prompts that its processor writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.media.image_processors import PROCESSORS, MolmoProcessor, states_vision
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.vision.loading import has_vision_tower, mlx_vlm_package, unloaded_mlx_vlm_model
from ingot.models.vision.molmo_towers import MOLMO_SIZES, molmo2_language, molmo2_tower, molmo_stated
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.served import ServedModel
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.http.scripted import CARD, settings
from tests.media.pictures import data_url, file_of
from tests.models.vision.looking import looked, prompt_with, reference
from tests.models.vision.references import features
from tests.models.vision.tiny_configs import OWN_SHAPE
from tests.models.vision.tiny_families import FILES, saved

pytest.importorskip("mlx_vlm")
TOKENS = [3, 111, 5, 113, 8, 2]


def logits(adapter: ModelAdapter) -> mx.array:
    rows = adapter.new_batch_state()
    return adapter.run(rows, mx.array(TOKENS), [ForwardPart((rows.new(),), len(TOKENS))])


def stored(folder: Path) -> dict[str, mx.array]:
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    mx.eval(found)
    return found


def by_makers(folder: Path, **changes: Any) -> Path:
    """The same checkpoint under their names; their config states no sizes of a tower, which is always as large."""
    weights = {
        name.replace("language_model.model.", "model.transformer.").replace(
            "vision_tower.", "model.vision_backbone."
        ): w
        for name, w in stored(folder).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    inside = OWN_SHAPE["molmo"]["text_config"]
    flat = {stated: inside[name] for name, (stated, _) in MOLMO_SIZES.items() if name in inside}
    config = {"model_type": "molmo", **flat, "vision_config": OWN_SHAPE["molmo"]["vision_config"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_makers_names_and_config_give_what_mlx_vlm_s_do(tmp_path: Path) -> None:
    folders = saved("molmo", tmp_path / "parts"), by_makers(saved("molmo", tmp_path / "flat"))
    adapters = [load_model_adapter(each, current_device(), dtype="float32", with_vision=True) for each in folders]
    parts, flat = adapters
    assert mx.array_equal(logits(parts), logits(flat))
    assert all(adapter.mixed and adapter.vocab == 128 and not adapter.notes for adapter in adapters)
    _, [item] = prompt_with(MolmoProcessor.of(ProcessorFiles({}, FILES["molmo"])), 1, ["image"])
    assert parts.tower is not None and flat.tower is not None
    assert mx.array_equal(looked(parts.tower, item).embeddings, looked(flat.tower, item).embeddings)


def test_a_config_that_states_no_tower_has_the_makers_own(tmp_path: Path) -> None:
    folder = by_makers(saved("molmo", tmp_path))
    config = {"model_type": "molmo", "hidden_size": 8192, "intermediate_size": 59136, "num_attention_heads": 64}
    assert states_vision(config) and has_vision_tower(folder, config)
    found = molmo_stated(config)
    assert found["vision_config"] == {"d_model": 8192, "hidden_size": 29568}
    assert found["text_config"]["n_heads"] == 64 and found["text_config"]["n_layers"] == 28


def test_patches_are_as_long_as_packed_weights_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights take a multiple of a group's numbers; the last number of a patch is repeated."""
    monkeypatch.setitem(OWN_SHAPE["molmo"]["vision_config"], "intermediate_size", 224)
    adapter = load_model_adapter(saved("molmo", tmp_path), current_device(), dtype="float32", with_vision=True)
    assert adapter.tower is not None
    _, [item] = prompt_with(MolmoProcessor.of(ProcessorFiles({}, FILES["molmo"])), 1, ["image"])
    found = looked(adapter.tower, item).embeddings
    wanted = features(reference(tmp_path), adapter, item)
    assert mx.abs(found - wanted).max().item() < 2e-3 * mx.abs(wanted).max().item()


@pytest.mark.parametrize("scored", [100, 128])
def test_an_output_head_has_as_many_rows_as_its_file(scored: int, tmp_path: Path) -> None:
    weights = stored(saved("molmo", tmp_path))
    head = weights["language_model.model.ff_out.weight"]
    weights["language_model.model.ff_out.weight"] = mx.concatenate([head, head])[:scored]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    found = logits(load_model_adapter(tmp_path, current_device(), dtype="float32"))
    assert found.shape == (len(TOKENS), 128)
    assert mx.isfinite(found[:, :scored]).all() and (found[:, scored:] == -mx.inf).all()


def test_a_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    folder = by_makers(saved("molmo", tmp_path), moe_num_experts=64)
    with pytest.raises(ModelError, match="moe_num_experts"):
        load_model_adapter(folder, current_device())


def test_norms_behind_parts_make_it_olmo_s(tmp_path: Path) -> None:
    """Whose queries and keys are normed as well. mlx-vlm does not have it."""
    folder = by_makers(saved("molmo", tmp_path), norm_after=True, qkv_bias=False)
    random = np.random.default_rng(7)
    weights = {name: weight for name, weight in stored(folder).items() if not name.endswith("att_proj.bias")}
    for block in range(3):
        for name, size in (("q_norm", 32), ("k_norm", 16)):
            factors = random.normal(1, 0.2, size).astype(np.float32)
            weights[f"model.transformer.blocks.{block}.{name}.weight"] = mx.array(factors)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    adapter = load_model_adapter(folder, current_device(), dtype="float32")
    wanted = olmo_logits({name.removeprefix("model.transformer."): weight for name, weight in weights.items()})
    found = logits(adapter)[:, :112]
    assert mx.abs(found - wanted).max().item() < 2e-3 * mx.abs(wanted).max().item()


def olmo_logits(weights: dict[str, mx.array], heads: int = 4, groups: int = 2, size: int = 8) -> mx.array:
    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, weights[f"{name}.weight"], 1e-6)

    def product(x: mx.array, name: str) -> mx.array:
        return x @ weights[f"{name}.weight"].T

    x = mx.concatenate([weights["wte.embedding"], weights["wte.new_embedding"]])[mx.array(TOKENS)]
    for number in range(3):
        own = f"blocks.{number}."
        q, k, v = mx.split(product(x, own + "att_proj"), [heads * size, (heads + groups) * size], axis=-1)
        q, k = norm(q, own + "q_norm"), norm(k, own + "k_norm")
        q, k, v = (each.reshape(1, len(TOKENS), -1, size).swapaxes(1, 2) for each in (q, k, v))
        q, k = (mx.fast.rope(each, size, traditional=False, base=10000.0, scale=1.0, offset=0) for each in (q, k))
        seen = mx.fast.scaled_dot_product_attention(q, k, v, scale=size**-0.5, mask="causal")
        seen = seen.swapaxes(1, 2).reshape(len(TOKENS), -1)
        x = x + norm(product(seen, own + "attn_out"), own + "attn_norm")
        up, gate = mx.split(product(x, own + "ff_proj"), 2, axis=-1)
        x = x + norm(product(gate * mx.sigmoid(gate) * up, own + "ff_out"), own + "ff_norm")
    return product(norm(x, "ln_f"), "ff_out")


SPECIAL = ("<|endoftext|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>", "<low_res_im_start>")
STATED = "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] }}{% endfor %}"


STATED_2 = """{% for message in messages %}{% if message['content'] is not string %}
{%- for part in message['content'] if part['type'] == 'image' %}{{ '<|image|>' }}{% endfor %}{% endif %}{% endfor %}
{%- for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"""


def served(folder: Path, model_type: str = "molmo", template: str = STATED) -> ServedModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    library.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    processor = PROCESSORS[model_type](ProcessorFiles({"model_type": model_type}))
    card = replace(CARD, vocab=library.get_vocab_size(), context=65_536)
    return ServedModel.of(card, Tokenizer.load(folder), settings(), processor=processor)


def image(width: int, height: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file_of(width, height))}}


def test_a_prompt_is_what_its_processor_writes_images_first(tmp_path: Path) -> None:
    from mlx_vlm.models.molmo.processing_molmo import MolmoImageProcessor

    model = served(tmp_path)
    question = [{"type": "text", "text": "What?"}, image(500, 300)]
    first = read_chat({"messages": [{"role": "user", "content": question}]}, model, "id").request
    ids = {token: model.tokenizer.encode(token, add_special=False)[0] for token in SPECIAL}
    _, tokens, _, _ = MolmoImageProcessor().preprocess(
        np.zeros((300, 500, 3), np.float32) + 7,
        *(ids[f"<im_{name}>"] for name in ("patch", "col", "start", "end")),
    )
    text = model.tokenizer.encode(" User: What? Assistant:", add_special=False)
    assert list(first.prompts[0]) == [ids["<|endoftext|>"], *tokens.tolist(), *text]
    [[item]] = first.media
    assert item.layout.features == int((tokens == ids["<im_patch>"]).sum())


def test_a_later_turn_has_its_images_before_itself_and_changes_no_earlier_token(tmp_path: Path) -> None:
    model = served(tmp_path)
    turns = [{"role": "user", "content": [image(64, 64)]}, {"role": "assistant", "content": " A cat."}]
    later = [*turns, {"role": "user", "content": [{"type": "text", "text": "And this?"}, image(90, 60), image(60, 90)]}]
    requests = [read_chat({"messages": each}, model, "id").request for each in (turns[:1], later)]
    before, after = (list(request.prompts[0]) for request in requests)
    assert after[: len(before)] == before
    written = model.tokenizer.decode(after[len(before) :], skip_special=False)
    assert written.startswith(" A cat.<im_start>") and written.endswith("<im_end> User: And this? Assistant:")
    assert [len(request.media[0]) for request in requests] == [1, 3]


@pytest.mark.parametrize("ends", [None, False])
def test_a_prompt_of_molmo_2_begins_with_a_token_and_has_what_its_processor_writes(
    ends: bool | None, tmp_path: Path
) -> None:
    from mlx_vlm.models.molmo2.processing import Molmo2ImageProcessor
    from transformers.models.molmo2.processing_molmo2 import Molmo2Processor

    model = served(tmp_path, "molmo2", STATED_2)
    assert model.processor is not None
    named = {"use_single_crop_col_tokens": ends}
    model = replace(model, processor=MolmoProcessor.of_2(ProcessorFiles({}, {}, {}, named)))
    question = [{"type": "text", "text": "What?"}, image(900, 400)]
    request = read_chat({"messages": [{"role": "user", "content": question}]}, model, "id").request
    theirs = SimpleNamespace(image_use_col_tokens=True, use_single_crop_start_token=True, **named)
    grids = Molmo2ImageProcessor().preprocess([np.full((400, 900, 3), 7, np.uint8)])["image_grids"]
    written = Molmo2Processor.replace_image_token(theirs, {"image_grids": grids.tolist()}, 0)
    assert model.tokenizer.decode(list(request.prompts[0]), skip_special=False) == f"<|endoftext|>{written}What?"
    [[item]] = request.media
    assert (item.begin, item.end) == (1, len(request.prompts[0]) - len("What?"))
    assert item.layout.mutual == item.end - item.begin


def test_layers_of_molmo_2_are_numbered_from_the_end_of_those_its_config_states(tmp_path: Path) -> None:
    """Its makers' config states 27 and their checkpoints have 25; mlx-vlm numbers those from their end."""
    config = json.loads(json.dumps(OWN_SHAPE["molmo2"]))
    config["vit_config"] |= {"num_hidden_layers": 27}
    config["adapter_config"] |= {"vit_layers": [-3, -9]}
    package = mlx_vlm_package(config)
    model = unloaded_mlx_vlm_model(package, config)
    assert len(model.vision_tower.image_vit.transformer) == 25
    files = ProcessorFiles(config, FILES["molmo2"])
    tower: Any = molmo2_tower(model, config, files, current_device())
    assert tower.encoder.gathered == (25, 19) and len(tower.encoder.layers) == 25


@pytest.mark.parametrize(
    "other", [{"norm_after": True}, {"qk_norm_type": "olmo3"}, {"qkv_bias": True}, {"rope_scaling_layers": [3]}]
)
def test_another_language_model_of_molmo_2_is_refused_by_name(other: dict[str, Any]) -> None:
    config = {**OWN_SHAPE["molmo2"], "text_config": {**OWN_SHAPE["molmo2"]["text_config"], **other}}
    with pytest.raises(ModelError, match=next(iter(other))):
        molmo2_language(config)


@pytest.mark.parametrize("size", [Size(1000, 30), Size(56, 2000), Size(112, 113), Size(1, 1), Size(3000, 2900)])
def test_tokens_are_as_many_as_its_processor_writes(size: Size) -> None:
    from mlx_vlm.models.molmo.processing_molmo import MolmoImageProcessor

    layout = MolmoProcessor.of(ProcessorFiles()).image_layout(size, ImageLayoutOptions())
    frame = np.zeros((size.height, size.width, 3), np.float32)
    with np.errstate(divide="ignore"):  # a side may be as long as its margins
        _, tokens, _, _ = MolmoImageProcessor().preprocess(frame, 1, 2, 3, 4)
    assert layout.features == int((tokens == 1).sum())

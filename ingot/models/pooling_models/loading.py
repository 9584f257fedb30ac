"""From a folder to an encoder for what it is asked to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.models import checkpoint
from ingot.models.adapter import Adapter
from ingot.models.encoders.config import EncoderConfig
from ingot.models.encoders.families import BUFFERS, FAMILIES, Family
from ingot.models.encoders.pooling import Pooling
from ingot.models.files.folder_checks import stated_context
from ingot.models.pooling_models.decoder import EmbeddingDecoder, JudgingDecoder, known_upstream, load_decoder
from ingot.models.pooling_models.encoder import Encoder, EncoderTraits, TrunkEncoder
from ingot.models.pooling_models.sentence_transformers import Recipe
from ingot.models.precision import settle

POOLERS = (r"^roberta\.pooler\.",)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"config.json of {folder.name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {folder.name} does not hold a JSON object")
    return config


def is_decoder(config: dict[str, Any]) -> bool:
    """Whether the model is run as mlx-lm's decoders are, not as one of our BERT-type families.

    Raises ModelError for one that is neither.
    """
    if config.get("model_type") in FAMILIES:
        return False
    if not known_upstream(config):
        raise ModelError(
            f"Models of type {config.get('model_type')!r} are not known as encoders. Known are {', '.join(FAMILIES)}, "
            "and the decoders that mlx-lm can load"
        )
    return True


def load_embedder(folder: Path, device: Device, recipe: Recipe, *, dtype: str | None = None) -> Encoder:
    """The model in `folder` that makes vectors by `recipe`. Raises ModelError with what is wrong with it."""
    config = read_config(folder)
    if is_decoder(config):
        return _embedding_decoder(load_decoder(folder, device, dtype=dtype, headless=True), config, recipe)
    if head := _classifying(config):
        raise ModelError(f"{folder.name} is a {head}: it scores pairs of texts. Give it with --rerank-model")
    family = FAMILIES[config["model_type"]]
    model = _built(family.trunk(config), family, folder, config, drop=family.prefix, unneeded=family.unneeded)
    notes = settle(model, device, dtype)
    pooling = Pooling(recipe, int(config["hidden_size"]))
    mx.eval(model.parameters(), pooling.parameters())
    traits = _traits(
        config, family.longest(config), recipe.length, pooling.dimension, recipe.unit, [*recipe.notes, *notes]
    )
    return _trunk(model, pooling, traits, config, family)


def load_reranker(
    folder: Path, device: Device, *, yes: int | None = None, no: int | None = None, dtype: str | None = None
) -> Encoder:
    """The model in `folder` that scores pairs; `yes` and `no` are the tokens that a decoder answers with."""
    config = read_config(folder)
    if is_decoder(config):
        if yes is None or no is None:
            raise ModelError(
                f"The tokenizer of {folder.name} has no single tokens for yes and no, which it judges with"
            )
        adapter = load_decoder(folder, device, dtype=dtype, headless=False)
        traits = EncoderTraits(adapter.family, adapter.vocab, adapter.context, 1, False, adapter.notes)
        return JudgingDecoder(adapter, traits, yes=yes, no=no)
    if not _classifying(config):
        raise ModelError(
            f"{folder.name} has no head that scores a pair of texts (its config.json names "
            f"{', '.join(_architectures(config)) or 'no architecture'}); a cross-encoder or a Qwen3-Reranker does"
        )
    _refuse_several_labels(config)
    family = FAMILIES[config["model_type"]]
    model: Any = _built(family.classifier(config), family, folder, config, drop="", unneeded=(*BUFFERS, *POOLERS))
    notes = settle(model, device, dtype)
    mx.eval(model.parameters())
    return _trunk(model, model.score, _traits(config, family.longest(config), None, 1, False, notes), config, family)


def _architectures(config: dict[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or []]


def _classifying(config: dict[str, Any]) -> str | None:
    return next((name for name in _architectures(config) if name.endswith("ForSequenceClassification")), None)


def _refuse_several_labels(config: dict[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 1)
    if count != 1:
        raise ModelError(f"The model sorts pairs into {count} classes; reranking needs one that gives a single score")


def _built(
    model: Any, family: Family, folder: Path, config: dict[str, Any], *, drop: str, unneeded: tuple[str, ...]
) -> Any:
    if "quantization" in config or "quantization_config" in config:
        raise ModelError(f"The weights of {folder.name} are quantised, which ingot does not know for encoders")
    found = checkpoint.renamed(checkpoint.read(folder), drop=drop)
    checkpoint.give(model, found, unneeded=unneeded, whose=folder.name)
    return model


def _traits(
    config: dict[str, Any], longest: int, stated: int | None, dimension: int, unit: bool, notes: list[str]
) -> EncoderTraits:
    length = longest if stated is None else min(longest, stated)
    if stated is not None and stated > longest:
        notes = [*notes, f"the files ask for inputs of {stated} tokens, the model has positions for {longest}"]
    vocab = EncoderConfig(config).number("vocab_size")
    return EncoderTraits(str(config["model_type"]), vocab, length, dimension, unit, tuple(notes))


def _trunk(model: Any, finish: Any, traits: EncoderTraits, config: dict[str, Any], family: Family) -> Encoder:
    stated = EncoderConfig(config)
    return TrunkEncoder(
        model,
        finish,
        traits,
        pad=stated.number("pad_token_id", family.pad),
        hidden=stated.number("hidden_size"),
        inner=stated.number("intermediate_size"),
        heads=stated.number("num_attention_heads"),
    )


def _embedding_decoder(adapter: Adapter, config: dict[str, Any], recipe: Recipe) -> Encoder:
    text = {**config, **(config.get("text_config") or {})}
    pooling = Pooling(recipe, EncoderConfig(text).number("hidden_size"))
    longest = stated_context(config)
    length = longest if recipe.length is None else min(longest, recipe.length)
    traits = EncoderTraits(
        adapter.family, adapter.vocab, length, pooling.dimension, recipe.unit, (*recipe.notes, *adapter.notes)
    )
    mx.eval(pooling.parameters())
    return EmbeddingDecoder(adapter, traits, pooling)

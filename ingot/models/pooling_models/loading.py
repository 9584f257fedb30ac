"""Loading embedding models and rerankers, and the table of BERT-type families: a new one is one class and one entry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.models import checkpoint
from ingot.models.adapter import ModelAdapter
from ingot.models.checkpoint import CheckpointConfig
from ingot.models.files.folder_checks import stated_context
from ingot.models.pooling_models import bert, modernbert
from ingot.models.pooling_models.decoder import (
    EmbeddingDecoder,
    RerankDecoder,
    is_known_to_mlx_lm,
    load_pooling_decoder,
)
from ingot.models.pooling_models.encoder import PoolingEncoder, PoolingTraits, TrunkEncoder
from ingot.models.pooling_models.sentence_transformers import PoolingRecipe, SentencePooling
from ingot.models.precision import settle_precision

CLASSIFIER_UNNEEDED = (r"position_ids$", r"token_type_ids$", r"^roberta\.pooler\.")
"""Buffers, and a pooler that scores do not use."""


def read_model_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"config.json of {folder.name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {folder.name} does not hold a JSON object")
    return config


def is_pooling_decoder(config: dict[str, Any]) -> bool:
    """Whether the model is run as mlx-lm's decoders are, not as one of our BERT-type families.

    Raises ModelError for one that is neither.
    """
    if config.get("model_type") in ENCODER_FAMILIES:
        return False
    if not is_known_to_mlx_lm(config):
        raise ModelError(
            f"Models of type {config.get('model_type')!r} are not supported as encoders. Supported are "
            f"{', '.join(ENCODER_FAMILIES)}, and the decoders that mlx-lm can load"
        )
    return True


def load_embedder(folder: Path, device: Device, recipe: PoolingRecipe, *, dtype: str | None = None) -> PoolingEncoder:
    """The model in `folder` that makes vectors by `recipe`. Raises ModelError with what is wrong with it."""
    config = read_model_config(folder)
    if is_pooling_decoder(config):
        return _embedding_decoder(load_pooling_decoder(folder, device, dtype=dtype, headless=True), config, recipe)
    if head := _classification_head(config):
        raise ModelError(f"{folder.name} is a {head}: it scores pairs of texts. Give it with --rerank-model")
    family = ENCODER_FAMILIES[config["model_type"]]
    model = _with_checkpoint_weights(family.trunk(config), family, folder, config, family.prefix, family.unneeded)
    notes = settle_precision(model, device, dtype)
    pooling = SentencePooling(recipe, int(config["hidden_size"]))
    mx.eval(model.parameters(), pooling.parameters())
    traits = _trunk_traits(
        config, model.longest, recipe.length, pooling.dimension, recipe.unit, [*recipe.notes, *notes]
    )
    return _trunk_encoder(model, pooling, traits, config, family)


def load_reranker(
    folder: Path, device: Device, *, yes: int | None = None, no: int | None = None, dtype: str | None = None
) -> PoolingEncoder:
    """The model in `folder` that scores pairs; `yes` and `no` are the tokens of a decoder's answer."""
    config = read_model_config(folder)
    if is_pooling_decoder(config):
        if yes is None or no is None:
            raise ModelError(
                f"The tokenizer of {folder.name} has no single tokens for yes and no, which its scores come from"
            )
        adapter = load_pooling_decoder(folder, device, dtype=dtype, headless=False)
        traits = PoolingTraits(adapter.family, adapter.vocab, adapter.context, 1, False, adapter.notes)
        return RerankDecoder(adapter, traits, yes=yes, no=no)
    if not _classification_head(config):
        raise ModelError(
            f"{folder.name} has no head that scores a pair of texts (its config.json names "
            f"{', '.join(_architectures(config)) or 'no architecture'}); a cross-encoder or a Qwen3-Reranker does"
        )
    _refuse_several_labels(config)
    family = ENCODER_FAMILIES[config["model_type"]]
    model = _with_checkpoint_weights(family.classifier(config), family, folder, config, "", CLASSIFIER_UNNEEDED)
    notes = settle_precision(model, device, dtype)
    mx.eval(model.parameters())
    return _trunk_encoder(
        model, model.score, _trunk_traits(config, model.longest, None, 1, False, notes), config, family
    )


def _architectures(config: dict[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or []]


def _classification_head(config: dict[str, Any]) -> str | None:
    return next((name for name in _architectures(config) if name.endswith("ForSequenceClassification")), None)


def _refuse_several_labels(config: dict[str, Any]) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 1)
    if count != 1:
        raise ModelError(f"The model sorts pairs into {count} classes; reranking needs one that gives a single score")


def _with_checkpoint_weights(
    model: Any, family: EncoderFamily, folder: Path, config: dict[str, Any], prefix: str, unneeded: tuple[str, ...]
) -> Any:
    if "quantization" in config or "quantization_config" in config:
        raise ModelError(f"The weights of {folder.name} are quantised, which is not supported for encoders")
    found = checkpoint.with_current_names(
        checkpoint.read_checkpoint_tensors(folder), drop=prefix, renamed=family.renamed
    )
    checkpoint.load_tensors(model, found, unneeded=unneeded, whose=folder.name)
    return model


def _trunk_traits(
    config: dict[str, Any], longest: int, stated: int | None, dimension: int, unit: bool, notes: list[str]
) -> PoolingTraits:
    length = longest if stated is None else min(longest, stated)
    if stated is not None and stated > longest:
        notes = [*notes, f"the files state inputs of {stated} tokens, the model has positions for {longest}"]
    vocab = CheckpointConfig(config).number("vocab_size")
    return PoolingTraits(str(config["model_type"]), vocab, length, dimension, unit, tuple(notes))


def _trunk_encoder(
    model: Any, finish: Any, traits: PoolingTraits, config: dict[str, Any], family: EncoderFamily
) -> PoolingEncoder:
    stated = CheckpointConfig(config)
    return TrunkEncoder(
        model,
        finish,
        traits,
        pad=stated.number("pad_token_id", family.pad),
        hidden=stated.number("hidden_size"),
        inner=stated.number("intermediate_size"),
        heads=stated.number("num_attention_heads"),
    )


def _embedding_decoder(adapter: ModelAdapter, config: dict[str, Any], recipe: PoolingRecipe) -> PoolingEncoder:
    text = {**config, **(config.get("text_config") or {})}
    pooling = SentencePooling(recipe, CheckpointConfig(text).number("hidden_size"))
    longest = stated_context(config)
    length = longest if recipe.length is None else min(longest, recipe.length)
    traits = PoolingTraits(
        adapter.family, adapter.vocab, length, pooling.dimension, recipe.unit, (*recipe.notes, *adapter.notes)
    )
    mx.eval(pooling.parameters())
    return EmbeddingDecoder(adapter, traits, pooling)


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    trunk: Callable[[dict[str, Any]], nn.Module]  # for embeddings
    classifier: Callable[[dict[str, Any]], nn.Module]  # for scores
    prefix: str  # of the trunk's tensors in a model with a head
    pad: int = 0  # where the config does not state one
    unneeded: tuple[str, ...] = bert.BERT_UNNEEDED  # tensors that embeddings do without
    renamed: tuple[tuple[re.Pattern[str], str], ...] = ()  # names of tensors in checkpoints, and here


_ROBERTA = EncoderFamily(bert.XlmRoberta, bert.roberta_classifier, "roberta.", pad=1)
ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(bert.Bert, bert.bert_classifier, "bert."),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "modernbert": EncoderFamily(
        modernbert.ModernBert,
        modernbert.ModernBertClassifier,
        "model.",
        unneeded=modernbert.MODERNBERT_UNNEEDED,
    ),
    "mpnet": EncoderFamily(bert.MPNet, bert.mpnet_classifier, "mpnet.", pad=bert.MPNET_PAD, renamed=bert.MPNET_RENAMED),
}

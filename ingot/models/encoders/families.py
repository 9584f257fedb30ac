"""The table of BERT-type families: a new one is one file and one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ingot.models.encoders import mpnet, xlm_roberta
from ingot.models.pooling_models import bert, modernbert


@dataclass(frozen=True, slots=True)
class Family:
    trunk: Callable[[dict[str, Any]], nn.Module]  # for embeddings
    classifier: Callable[[dict[str, Any]], nn.Module]  # for scores
    prefix: str  # of the trunk's tensors in a model with a head
    longest: Callable[[dict[str, Any]], int]
    pad: int  # where the config does not state one
    unneeded: tuple[str, ...]  # tensors that embeddings do without


_BERT = Family(bert.Bert, bert.BertClassifier, "bert.", bert.longest, 0, bert.UNNEEDED)
_ROBERTA = Family(
    xlm_roberta.XlmRoberta, xlm_roberta.XlmRobertaClassifier, "roberta.", xlm_roberta.longest, 1, bert.UNNEEDED
)
_MODERN = Family(
    modernbert.ModernBert,
    modernbert.ModernBertClassifier,
    "model.",
    modernbert.longest,
    0,
    modernbert.UNNEEDED,
)
_MPNET = Family(mpnet.MPNet, mpnet.MPNetClassifier, "mpnet.", mpnet.longest, mpnet.PAD, bert.UNNEEDED)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": _MODERN,
    "mpnet": _MPNET,
}
BUFFERS = (r"position_ids$", r"token_type_ids$")
"""Tensors that are written into checkpoints and say nothing."""

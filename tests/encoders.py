"""Encoders for tests: one that counts instead of computing, and tiny ones of random weights in folders of their own."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.engine.pooling import ServedPoolingModel
from ingot.engine.request import PoolingModelCard, PoolingTask
from ingot.text.tokenizer.encoder_inputs import PairInputs, RerankInputs, TextInputs
from ingot.text.tokenizer.length_bounds import TokenFloor

CLS, SEP, VOCAB = 256, 257, 300
LENGTH, DIMENSION = 64, 4


class ByteVocabulary:
    """Each byte is a token; 256 begins a text and 257 ends it."""

    spelling = "plain"
    special_ids = frozenset({CLS, SEP})
    size = VOCAB
    added: Mapping[str, bool] = {}

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        inner = list(text.encode())
        return [CLS, *inner, SEP] if add_special else inner

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        one, two = list(first.encode()), list(second.encode())
        return [CLS, *one, SEP, *two, SEP], [0] * (len(one) + 2) + [1] * (len(two) + 1)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return bytes(id for id in ids if id < 256).decode(errors="replace")

    def piece(self, token: int) -> str | None:
        return chr(token)

    def id_of(self, piece: str) -> int | None:
        return None

    def floor(self, spell: Callable[[int], bytes]) -> TokenFloor | None:
        return TokenFloor((1, 1, 1, 1, 1, 1))


class CountingEncoder:
    """Row: how many tokens, their sum, the sum of their types, and 1. `parts` is how often it lets go in between."""

    def __init__(self, parts: int = 2, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.parts, self.meanwhile = parts, meanwhile
        self.batches: list[list[Sequence[int]]] = []
        self.rested = 0
        self.failure: Exception | None = None

    def run(
        self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> Generator[None, None, list[array[float]]]:
        self.batches.append(list(tokens))
        for _ in range(self.parts):
            self.meanwhile()
            if self.failure is not None:
                raise self.failure
            yield
        return [row_of(one, kinds) for one, kinds in zip(tokens, types, strict=True)]

    def rest(self) -> None:
        self.rested += 1


def row_of(tokens: Sequence[int], types: Sequence[int] = ()) -> array[float]:
    return array("f", [len(tokens), sum(tokens), sum(types), 1.0])


def card(role: PoolingTask, **changes: Any) -> PoolingModelCard:
    told: dict[str, Any] = {
        "role": role,
        "name": f"toy-{role}",
        "source": "test",
        "family": "toy",
        "length": LENGTH,
        "dimension": DIMENSION if role == "embedding" else 1,
        "unit": role == "embedding",
        "vocab": VOCAB,
        "dtype": "none",
        "weight_bytes": 0,
        "batch_tokens": 256,
        "created": 1_700_000_000,
    }
    return PoolingModelCard(**told | changes)


def offered(role: PoolingTask, model: Any = None, **changes: Any) -> ServedPoolingModel:
    described = card(role, **changes)
    vocabulary: Any = ByteVocabulary()
    inputs: TextInputs | RerankInputs
    if role == "embedding":
        inputs = TextInputs(vocabulary, length=described.length, prompts={"query": "Q:", "document": ""})
    else:
        inputs = PairInputs(vocabulary, length=described.length)
    return ServedPoolingModel(described, inputs, model or CountingEncoder())


# Folders, with weights that mean nothing

WORDS = ("cat", "dog", "fish", "sun", "moon", "rain", "yes", "no", "a", "b", "the", "is", "in", "on", "what", "who")
SHARED: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def write_words(folder: Path) -> None:
    """A tokenizer of a few words, with the marks that BERT puts around them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*marks, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(marks)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))


def write_encoder(folder: Path, family: str, *, head: bool = False, seed: int = 0, **changes: Any) -> Path:
    """A folder as transformers would save it: BERT-type weights by their names, a config, a tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    from ingot.models.pooling_models.loading import ENCODER_FAMILIES

    config = {"model_type": family, **SHARED, **changes}
    if head:
        config |= {"architectures": ["ToyForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    known = ENCODER_FAMILIES[family]
    mx.random.seed(seed)
    model = (known.classifier if head else known.trunk)(config)
    model.update(tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape), model.parameters()))
    write_words(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sentence_files(folder: Path, pooling: dict[str, Any], *, modules: Sequence[str] = ("Normalize",)) -> None:
    """What sentence-transformers puts beside a model."""
    kinds = ["Transformer", "Pooling", *modules]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

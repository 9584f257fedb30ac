"""The cross-encoder's tokenizer: WordPiece over lower-case text, as BERT has it.

`python -m foundry.rerank.wordpiece` trains it and writes foundry/rerank/tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from foundry import corpus

PATH = Path(__file__).parent / "tokenizer.json"
SIZE = 4096
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main() -> None:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=list(SPECIAL), show_progress=False)
    made.train_from_iterator(_texts(), trainer)
    start, stop = made.token_to_id("[CLS]"), made.token_to_id("[SEP]")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", start), ("[SEP]", stop)],
    )
    made.save(str(PATH))
    print(f"{made.get_vocab_size()} tokens")


def _texts() -> Iterator[str]:
    from foundry.rerank.lessons import statements

    yield from corpus.documents(held_out=False)
    # The names that lessons are made of must not fall to pieces.
    for _ in range(200):
        yield from statements()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PATH))


if __name__ == "__main__":
    main()

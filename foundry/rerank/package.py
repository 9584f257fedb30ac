"""Make a model folder of the trained cross-encoder: `python -m foundry.rerank.package TRAINED`. Needs no torch."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from foundry.package import MODELS, copy_trained, put
from foundry.rerank import wordpiece
from foundry.rerank.shape import config, tokenizer_config


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model folder of the trained cross-encoder.")
    parser.add_argument("trained", type=Path)
    package(parser.parse_args().trained, MODELS / "rerank")


def package(trained: Path, folder: Path) -> Path:
    copy_trained(trained, folder)
    put(folder / "config.json", config())
    put(folder / "tokenizer_config.json", tokenizer_config())
    shutil.copyfile(wordpiece.PATH, folder / "tokenizer.json")
    words = wordpiece.tokenizer().get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(words, key=words.__getitem__)))
    return folder


if __name__ == "__main__":
    main()

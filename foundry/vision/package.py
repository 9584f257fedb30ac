"""Make a model folder of the trained vision model: `python -m foundry.vision.package TRAINED`. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundry import dialect
from foundry.package import MODELS, dress, put
from foundry.vision.prompts import STYLE
from foundry.vision.shape import CONTEXT, config, image_processor, video_processor


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model folder of the trained vision model.")
    parser.add_argument("trained", type=Path)
    package(parser.parse_args().trained, MODELS / "vision")


def package(trained: Path, folder: Path) -> Path:
    dress(trained, folder, config(), STYLE, CONTEXT)
    put(folder / "preprocessor_config.json", image_processor())
    put(folder / "video_preprocessor_config.json", video_processor())
    (folder / "chat_template.jinja").write_text(dialect.template_text(STYLE))
    return folder


if __name__ == "__main__":
    main()

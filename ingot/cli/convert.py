"""`ingot convert SOURCE TARGET`: packs a model's weights and keeps its head as it is, or gives a packed model one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.config import Settings
from ingot.errors import ConfigError

ABOUT = (
    "Pack a model's weights into fewer bits, and keep beside them, in bfloat16, the head that guesses further tokens. "
    "Or take such a head out of another checkpoint and join it to a model that is packed already."
)
PACKING = ("mode", "bits", "group_size")


def run(arguments: list[str]) -> int:
    parser = CommandParser("convert", ABOUT)
    parser.add_argument(
        "source", metavar="SOURCE", help="a model folder, a hub id, or a name that `ingot models` lists"
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="the folder to make")
    parser.flag("--bits", type=int, metavar="N", help="of a weight: 2, 3, 4, 5, 6 or 8 (default: 4)")
    parser.flag("--group-size", type=int, metavar="N", help="weights that share a scale: 32, 64 or 128 (default: 64)")
    parser.flag("--mode", metavar="MODE", help="affine, or a form of its own: mxfp4, nvfp4, mxfp8 (default: affine)")
    parser.flag(
        "--head-from",
        metavar="MODEL",
        help="take the head out of this folder, file or hub id, of which only the files that hold it are read",
    )
    add_settings(parser, ("the model", "the rest"), leave_out=("context", "dtype", "chat_template"))
    namespace = parser.parse(arguments)
    return _convert(namespace, settle(namespace).settings)


def _convert(namespace: argparse.Namespace, settings: Settings) -> int:
    from ingot.models.convert import Conversion, is_packed
    from ingot.models.convert_head_from import head_from
    from ingot.models.convert_packing import packing
    from ingot.models.draft_heads.checkpoint import find_head
    from ingot.models.files.locate import locate
    from ingot.models.files.progress import TerminalProgress, format_bytes
    from ingot.text.json_file import read_object

    given = {name: value for name, value in vars(namespace).items() if name in PACKING}
    asked, donor = packing(**given), vars(namespace).get("head_from")
    progress = TerminalProgress()
    folder = locate(namespace.source, settings, progress)
    config = read_object(folder.path / "config.json")
    packed = is_packed(config)
    if packed and given:
        raise ConfigError(f"{folder.name} is packed already: packing it again would only lose more")
    if packed and donor is None:
        raise ConfigError(f"{folder.name} is packed already; --head-from joins a head to it")
    head = find_head(folder.path, config) if donor is None else head_from(donor, config, settings, progress)
    target = namespace.target.expanduser().absolute()
    Conversion(folder.path, folder.name, None if packed else asked, head).run(target, progress)
    progress.finish()
    print(target)
    if head is None:
        print("note: it has no head that guesses further tokens, or none that is known", file=sys.stderr)
    else:
        files = ", ".join(file.name for file in head.files)
        print(
            f"head: {len(head.tensors)} tensors, {head.nbytes} bytes ({format_bytes(head.nbytes)}) read from {files}",
            file=sys.stderr,
        )
    return 0

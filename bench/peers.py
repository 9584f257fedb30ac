"""`ingot bench peers` on models made for measuring, which are random: how they answer says nothing, how fast does.

python -m bench.peers                                    the default model, and one whose arithmetic costs nothing
python -m bench.peers --models hybrid,window --work agent --rounds 5
INGOT_KERNELS=blas python -m bench.peers --models dispatch --peers mlx_lm.server --work streams
                                                         ingot with MLX's kernels on CPUs, as the other server has them

`append`, `hybrid` and `window` have layers of these kinds and room for sessions of 16,000 tokens. All other flags are
those of `ingot bench peers`; a report goes into a folder for each model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import agent_models
from bench.arguments import words
from bench.random_models import SHAPES
from ingot.cli.main import main as ingot
from ingot.config import DEFAULT_MODEL
from ingot.models.files.progress import TerminalProgress

DEFAULT = "default"
MODELS = (DEFAULT, *SHAPES, *agent_models.CONFIGS)


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of `ingot bench peers`."""
    parser = argparse.ArgumentParser("bench.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=words(MODELS), default=(DEFAULT, "dispatch"), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--report", type=Path, help="a folder for what is written")
    parser.add_argument("--peers", help="NAME,...: as in `ingot bench peers`, and so are all other flags")
    parser.add_argument("--work", help="NAME,...: the same")
    parser.add_argument("--rounds", help="the same")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, others = read(sys.argv[1:] if arguments is None else arguments)
    for name in ("peers", "work", "rounds"):
        others += [] if vars(chosen)[name] is None else [f"--{name}", vars(chosen)[name]]
    codes = []
    for name in chosen.models:
        with tempfile.TemporaryDirectory(prefix="ingot-bench-") as scratch:
            model = DEFAULT_MODEL if name == DEFAULT else str(Path(scratch) / name)
            if name != DEFAULT:
                agent_models.write(name, Path(model), TerminalProgress())
            report = [] if chosen.report is None else ["--report", str(chosen.report / name)]
            codes.append(ingot(["bench", "peers", model, *others, *report]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench [SUBJECT] [FLAGS]`: runs one of these benchmarks; by default the comparison with other servers."""

from __future__ import annotations

import runpy
import sys

SUBJECTS = (
    *("peers", "http_share", "engine", "cpu", "attention", "families", "grammar", "restore", "blocks"),
    *("paged", "packed", "dense", "gpu", "gpu_diagnosis", "speculate", "restart", "codecs", "sparse", "sparse_quality"),
    *("sparse_scoring", "sparse_turns", "soak", "pictures", "replicas", "ranks", "adapters", "unpacking"),
    *("experts", "mutated_media", "audio", "speech", "turns", "live", "gguf_models", "prompts", "unloading"),
    *("lazy_start", "sparse_layers", "host"),
)


def main(arguments: list[str]) -> None:
    named = bool(arguments) and not arguments[0].startswith("-")
    subject = arguments[0].replace("-", "_") if named else SUBJECTS[0]
    if subject not in SUBJECTS:
        sys.exit(f"bench: unknown benchmark {arguments[0]!r}; benchmarks: {', '.join(SUBJECTS)}")
    sys.argv = [f"bench.{subject}", *arguments[named:]]
    runpy.run_module(f"bench.{subject}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

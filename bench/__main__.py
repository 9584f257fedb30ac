"""`python -m bench [SUBJECT] [FLAGS]`: one of the benchmarks here; without a subject, the one against other servers."""

from __future__ import annotations

import runpy
import sys

SUBJECTS = (
    *("serve", "http_share", "engine", "cpu", "attention", "hybrid", "grammar", "agent", "restore", "blocks"),
    *("paged", "packed", "dense", "gpu", "gpu_diagnosis", "speculate", "restart", "codecs", "sparse", "sparse_quality"),
    *("sparse_scoring", "sparse_turns", "soak", "pictures", "replicas", "ranks", "adapters", "unpacking"),
    "mutated_media",
)


def main(arguments: list[str]) -> None:
    named = bool(arguments) and not arguments[0].startswith("-")
    subject = arguments[0].replace("-", "_") if named else SUBJECTS[0]
    if subject not in SUBJECTS:
        sys.exit(f"bench: there is no benchmark {arguments[0]!r}; there are: {', '.join(SUBJECTS)}")
    sys.argv = [f"bench.{subject}", *arguments[named:]]
    runpy.run_module(f"bench.{subject}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

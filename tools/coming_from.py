"""`python -m tools.coming_from` writes docs/coming-from.md, by the table of other servers' flags."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.config import SETTINGS
from ingot.config.foreign import SERVERS, TABLE

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
DEEDS = {
    "same": "the same flag",
    "maps": "mapped to a setting",
    "always": "accepted: always so",
    "refused": "refused, with what does it",
    "other": "another meaning",
}
HEAD = """# Coming from another server

`ingot serve` takes the flags of vLLM, vllm-mlx, Rapid-MLX, mlx_lm.server and llama-server, and reads the variables of
Ollama, llama-server (`LLAMA_ARG_...`) and vLLM (`VLLM_API_KEY`). Most lines that start another server start this one:

```sh
ingot serve --model smollm2-135m --max-model-len 2048 --max-num-seqs 8 --gpu-memory-utilization 0.8
ingot serve -m smollm2-135m -c 2048 -np 4 -ngl 99 --jinja -ctk q8_0 -ctv q8_0
```

- A flag is **mapped** to a setting, its value translated; or **accepted** with a line in the log, where ingot always
  does what it asks for; or **refused** with what does the same here. None is accepted and ignored.
- A flag of ingot's own and another server's for the same setting may both be given if they say the same; otherwise
  that is an error.
- Switches have their negated forms, with `no-` in front. Keys in the config file and `INGOT_...` variables may have the
  other servers' names, too: `max_model_len = 2048`, `INGOT_MAX_MODEL_LEN=2048`.
- Other servers' variables may be meant for another server on the same machine, so they count only in `ingot serve`, and
  only where no flag, `INGOT_...` variable or config file says anything. One that asks for what ingot does not do is a
  line in the log, not an error; a value that cannot be read is an error.
- `ingot serve ... --print-config` shows what came of it.
- `ingot chat`, `ingot bench serve MODEL` and `ingot bench speculate MODEL` take the same flags, as far as they have the
  settings.

"""


def write_page(table: Mapping[str, Any]) -> str:
    parts = [HEAD, "## How many", *_counts(table), "", "## Mapped", "", "| there | of | here |", "|---|---|---|"]
    parts += [_row(row, _mapped(row)) for row in table["maps"]]
    for deed, title in (("always", "Accepted"), ("refused", "Refused"), ("other", "The same name, another meaning")):
        parts += ["", f"## {title}", "", "| there | of | here |", "|---|---|---|"]
        parts += [_row(row, row["note"]) for row in table[deed]]
    parts += ["", "## The same", "", "| flags | of |", "|---|---|"]
    parts += [f"| {_names(row)} | {_servers(row)} |" for row in table["same"]]
    for name, title in (
        ("tool_parsers", "Tool parsers"),
        ("reasoning_parsers", "Reasoning parsers"),
        ("kv_dtypes", "KV cache dtypes"),
        ("ggml_types", "KV cache types of llama-server and Ollama"),
    ):
        parts += ["", f"## {title}", "", "| there | here |", "|---|---|"]
        parts += [f"| {_code(words.split())} | {_value(ours)} |" for words, ours in table["values"][name].items()]
    return "\n".join(parts) + "\n"


def _counts(table: Mapping[str, Any]) -> list[str]:
    """Names by server and by what becomes of them."""
    lines = ["", f"| | {' | '.join(DEEDS.values())} |", "|---|" + "---:|" * len(DEEDS)]
    for server, title in SERVERS.items():
        counts = [str(len(_names_of(table[deed], server))) for deed in DEEDS]
        lines.append(f"| {title} | {' | '.join(counts)} |")
    each = [len({name for row in table[deed] for name in row["names"].split()}) for deed in DEEDS]
    return [*lines, f"| all names | {' | '.join(map(str, each))} |"]


def _names_of(rows: Iterable[Mapping[str, Any]], server: str) -> set[str]:
    return {
        name
        for row in rows
        if server in row["of"].split()
        for name in row["names"].split()
        if name.startswith("-") or name.startswith(VARIABLE_OWNERS.get(server, "-"))
    }


VARIABLE_OWNERS = {"ollama": "OLLAMA_", "llama-server": "LLAMA_", "vllm": "VLLM_"}


def _row(row: Mapping[str, Any], here: str) -> str:
    return f"| {_names(row)} | {_servers(row)} | {here} |"


def _names(row: Mapping[str, Any]) -> str:
    return _code(row["names"].split())


def _code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _servers(row: Mapping[str, Any]) -> str:
    return ", ".join(SERVERS[server] for server in row["of"].split())


def _mapped(row: Mapping[str, Any]) -> str:
    name, _, part = row["to"].partition(":")
    option = SETTINGS[name]
    shown = f"`{option.positional or option.flag}`" + (f", its `{part}`" if part else "")
    if "on" in row and row["on"] is not True:
        shown = f"`{'--no-' + option.flag[2:] if row['on'] is False else option.flag + ' ' + row['on']}`"
    return shown + (f": {row['note']}" if "note" in row else "")


def _value(ours: str) -> str:
    if ours.startswith("!"):
        return f"refused: {ours[1:]}"
    return f"`{ours}`" if ours else "as the model has it"


if __name__ == "__main__":
    PAGE.write_text(write_page(tomllib.loads(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")

"""The clients that `ingot launch` starts, by name: Claude Code, Codex, opencode and aider.

- Claude Code: variables, which its own settings files override, so they are passed as settings as well.
- Codex: its configuration as flags, and a catalogue with the model, without which it uses defaults.
- opencode: one more layer of its configuration, in a variable.
- aider: flags, variables of its own (a project's .env would override others), and a file about the model.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingot.errors import ConfigError, nearest_name

CLIENT_TIMEOUT_S: Final = 3600
"""How long a client is to wait for an answer, as long as the server works on one. Prompts of agents are long, and
where only a CPU computes them, the first takes minutes."""
NO_KEY: Final = "unneeded"  # the key for clients that insist on one, when the server needs none
LONGEST_ANSWER: Final = 32_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A served model. `url` is the server's root, `context` all that a prompt and its answer may take together."""

    url: str
    key: str | None
    model: str
    context: int

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def secret(self) -> str:
        return self.key or NO_KEY

    @property
    def answer(self) -> int:
        """Tokens to keep free for an answer."""
        return min(self.context // 4, LONGEST_ANSWER)

    @property
    def prompt(self) -> int:
        """Tokens that a conversation may take before it has to be made shorter."""
        return self.context - self.answer


@dataclass(frozen=True, slots=True)
class ClientStart:
    """One run of a client. `files` lie in a folder that is gone after it; `without` is left out of its environment."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigSnippet:
    """A text for the user to put into a file or a shell, and the language it is in."""

    place: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Agent:
    """`launch` makes the command that starts it, with a folder for its files; `snippets` are for starting it by hand.

    `first_prompt` is about how many tokens its first prompt has, before the user has written anything.
    """

    name: str
    title: str
    program: str
    install: str
    first_prompt: int
    launch: Callable[[Endpoint, Path], ClientStart]
    snippets: Callable[[Endpoint], tuple[ConfigSnippet, ...]]

    def warning(self, endpoint: Endpoint) -> str | None:
        """What to say of a context in which there is little room to work."""
        if endpoint.prompt >= 2 * self.first_prompt:
            return None
        return (
            f"{self.title} begins with about {self.first_prompt} tokens, and {endpoint.model} has a context of "
            f"{endpoint.context}: there is little room to work; `ingot serve --context N` makes it longer where the "
            "model allows it"
        )


CLAUDE_FIRST_PROMPT: Final = 20_000
CLAUDE_COMPACTS_BEFORE: Final = 13_000
"""Tokens before the end of its window, less an answer, at which it compacts a conversation by itself."""
CLAUDE_MODEL_SIZES: Final = ("OPUS", "SONNET", "HAIKU", "FABLE")
# Each of these would have it ask somebody else, or with another key.
CLAUDE_OTHER_VARIABLES: Final = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
)


def claude_variables(endpoint: Endpoint) -> dict[str, str]:
    # It assumes the window of any model whose name begins so, whatever is configured.
    model = "default" if endpoint.model.startswith("claude-") else endpoint.model
    wait = str(CLIENT_TIMEOUT_S * 1000)
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.secret,
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": model for size in CLAUDE_MODEL_SIZES},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        "API_TIMEOUT_MS": wait,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": wait,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # It would compact the first prompt already, and again at each turn. So it asks for /compact at the window's end.
    if endpoint.prompt - CLAUDE_COMPACTS_BEFORE < CLAUDE_FIRST_PROMPT * 3 // 2:
        variables["DISABLE_AUTO_COMPACT"] = "1"
    return variables


def launch_claude(endpoint: Endpoint, folder: Path) -> ClientStart:
    variables = claude_variables(endpoint)
    settings = folder / "settings.json"
    return ClientStart(
        arguments=("--settings", str(settings)),
        environment=variables,
        without=CLAUDE_OTHER_VARIABLES,
        files={settings: json.dumps({"env": {**dict.fromkeys(CLAUDE_OTHER_VARIABLES, ""), **variables}}, indent=2)},
    )


def claude_snippets(endpoint: Endpoint) -> tuple[ConfigSnippet, ...]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in claude_variables(endpoint).items()]
    return (ConfigSnippet("your shell", "sh", "\n".join([*exports, "claude"])),)


CLAUDE = Agent(
    "claude",
    "Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    first_prompt=CLAUDE_FIRST_PROMPT,
    launch=launch_claude,
    snippets=claude_snippets,
)


CODEX_CATALOGUE: Final = "ingot-models.json"
CODEX_KEY_VARIABLE: Final = "INGOT_API_KEY"
CODEX_LONGEST_RESULT: Final = 10_000
# Codex has instructions of its own for models that it knows, and takes a model into its catalogue only with some.
CODEX_INSTRUCTIONS: Final = """\
You are a coding agent in the terminal of the user's machine, run by the Codex CLI. Work on the task until it is done, \
with the tools that you are given, and then say in a few words what you did.

- Look before you change anything: read the files that matter, and search with `rg` where it is there.
- Follow the instructions of AGENTS.md files, for the folders that they are in.
- Change files with `apply_patch`. Keep to the style of what is there, and change nothing that the task does not need.
- Check what you did where you can: run the tests, or the program.
- Do not commit, push, or undo what others did, unless you are asked to.
- If a command fails, read why before you try another. If you cannot go on, say what is in the way.\
"""


def codex_config(endpoint: Endpoint, catalogue: str) -> dict[str, Any]:
    provider = {
        "name": "ingot",
        "base_url": endpoint.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": CLIENT_TIMEOUT_S * 1000,
    }
    return {
        "model": endpoint.model,
        "model_provider": "ingot",
        "model_context_window": endpoint.context,
        "model_auto_compact_token_limit": endpoint.prompt,
        "model_catalog_json": catalogue,
        "model_providers": {"ingot": provider | ({"env_key": CODEX_KEY_VARIABLE} if endpoint.key else {})},
    }


def codex_catalogue(endpoint: Endpoint) -> dict[str, Any]:
    entry = {
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "context_window": endpoint.context,
        "effective_context_window_percent": 100,
        "base_instructions": CODEX_INSTRUCTIONS,
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": min(CODEX_LONGEST_RESULT, endpoint.context // 8)},
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "support_verbosity": False,
        "supported_in_api": True,
        "visibility": "list",
        "priority": 0,
    }
    return {"models": [entry]}


def launch_codex(endpoint: Endpoint, folder: Path) -> ClientStart:
    catalogue = folder / CODEX_CATALOGUE
    flags = [f"{name}={_toml_value(value)}" for name, value in _flatten_table(codex_config(endpoint, str(catalogue)))]
    return ClientStart(
        arguments=tuple(word for flag in flags for word in ("-c", flag)),
        environment={CODEX_KEY_VARIABLE: endpoint.key} if endpoint.key else {},
        files={catalogue: json.dumps(codex_catalogue(endpoint))},
    )


def codex_snippets(endpoint: Endpoint) -> tuple[ConfigSnippet, ...]:
    config = codex_config(endpoint, CODEX_CATALOGUE)
    provider = config.pop("model_providers")["ingot"]
    lines = [
        *(f"{name} = {_toml_value(value)}" for name, value in config.items()),
        "",
        "[model_providers.ingot]",
        *(f"{name} = {_toml_value(value)}" for name, value in provider.items()),
    ]
    exported = (
        (ConfigSnippet("your shell", "sh", f"export {CODEX_KEY_VARIABLE}={shlex.quote(endpoint.key)}"),)
        if endpoint.key
        else ()
    )
    return (
        ConfigSnippet("~/.codex/config.toml", "toml", "\n".join(lines)),
        ConfigSnippet(f"~/.codex/{CODEX_CATALOGUE}", "json", json.dumps(codex_catalogue(endpoint), indent=2)),
        *exported,
    )


def _flatten_table(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten_table(value, f"{path}{name}.")
        else:
            yield path + name, value


def _toml_value(value: str | int) -> str:
    """A text or a number. What JSON writes of either, TOML reads."""
    return json.dumps(value, ensure_ascii=False)


CODEX = Agent(
    "codex",
    "Codex",
    program="codex",
    install="npm install -g @openai/codex",
    first_prompt=5_000,
    launch=launch_codex,
    snippets=codex_snippets,
)


def opencode_config(endpoint: Endpoint) -> dict[str, Any]:
    wait = CLIENT_TIMEOUT_S * 1000
    limits = {"context": endpoint.context, "output": endpoint.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ingot",
        "options": {"baseURL": endpoint.api, "apiKey": endpoint.secret, "timeout": wait, "chunkTimeout": wait},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limits}},
    }
    name = f"ingot/{endpoint.model}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {"ingot": provider},
    }


def launch_opencode(endpoint: Endpoint, folder: Path) -> ClientStart:
    return ClientStart(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(opencode_config(endpoint))})


def opencode_snippets(endpoint: Endpoint) -> tuple[ConfigSnippet, ...]:
    return (ConfigSnippet("~/.config/opencode/opencode.json", "json", json.dumps(opencode_config(endpoint), indent=2)),)


OPENCODE = Agent(
    "opencode",
    "opencode",
    program="opencode",
    install="npm install -g opencode-ai",
    first_prompt=7_000,
    launch=launch_opencode,
    snippets=opencode_snippets,
)


AIDER_METADATA: Final = ".aider.model.metadata.json"


def aider_model_name(endpoint: Endpoint) -> str:
    """As litellm wants it: the protocol first."""
    return f"openai/{endpoint.model}"


def aider_metadata(endpoint: Endpoint) -> dict[str, Any]:
    return {
        aider_model_name(endpoint): {
            "max_input_tokens": endpoint.prompt,
            "max_output_tokens": endpoint.answer,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }


def launch_aider(endpoint: Endpoint, folder: Path) -> ClientStart:
    metadata, name = folder / AIDER_METADATA, aider_model_name(endpoint)
    return ClientStart(
        arguments=(
            *("--model", name),
            *("--weak-model", name),
            *("--model-metadata-file", str(metadata)),
            *("--timeout", str(CLIENT_TIMEOUT_S)),
            "--no-show-model-warnings",
        ),
        environment={"AIDER_OPENAI_API_BASE": endpoint.api, "AIDER_OPENAI_API_KEY": endpoint.secret},
        files={metadata: json.dumps(aider_metadata(endpoint))},
    )


def aider_snippets(endpoint: Endpoint) -> tuple[ConfigSnippet, ...]:
    variables = {
        "model": aider_model_name(endpoint),
        "weak-model": aider_model_name(endpoint),
        "openai-api-base": endpoint.api,
        "openai-api-key": endpoint.secret,
        "timeout": CLIENT_TIMEOUT_S,
        "show-model-warnings": False,
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in variables.items()]
    return (
        ConfigSnippet("~/.aider.conf.yml", "yaml", "\n".join(lines)),
        ConfigSnippet(f"~/{AIDER_METADATA}", "json", json.dumps(aider_metadata(endpoint), indent=2)),
    )


AIDER = Agent(
    "aider",
    "aider",
    program="aider",
    install="python -m pip install aider-install && aider-install",
    first_prompt=1_000,
    launch=launch_aider,
    snippets=aider_snippets,
)


AGENTS: dict[str, Agent] = {agent.name: agent for agent in (CLAUDE, CODEX, OPENCODE, AIDER)}


def agent_by_name(name: str) -> Agent:
    """Raises ConfigError that names the nearest."""
    if (found := AGENTS.get(name)) is not None:
        return found
    near = nearest_name(name, AGENTS)
    raise ConfigError(f"unknown client {name}; " + (f"did you mean {near}?" if near else f"known: {', '.join(AGENTS)}"))

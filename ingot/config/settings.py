"""The settings: every field with its default, help text and limits, in the order of `--help`.

A `Settings` object is always valid: limits, and which settings go together, are checked when one is made.
"""

# ruff: noqa: RUF009  (`setting` is dataclasses.field with a help text in its metadata)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.config.checks import (
    GIB,
    KIB,
    MIB,
    LoraModule,
    alias_problem,
    codec_problem,
    endpoint_problem,
    expert_memory_problem,
    format_problem,
    host_problem,
    is_loopback,
    is_lora_name,
    lora_modules,
    lora_problem,
    mcp_problem,
    media_hosts_problem,
    memory_problem,
    names_problem,
    origin_problem,
    override_problem,
    problem_from,
    speculate_problem,
    thinking_problem,
    variables_problem,
)
from ingot.config.field import Setting, setting, settings_of
from ingot.config.keys import key_file_problem, key_problem, own_key_problem
from ingot.config.model_tables import read_model_tables, read_registry
from ingot.errors import ConfigError
from ingot.text.input_files import generation_config_problem, read_prompts

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class SettingsTable:
    """The fields. Instances are made as `Settings`, which checks them."""

    model: str = setting(
        DEFAULT_MODEL,
        "a local folder, a .gguf file, a hub id, a packaged model or a short name (`ingot models --recommend`)",
        section="the model",
        positional="MODEL",
    )
    models_dir: Path = setting(Path("~/.cache/ingot/models"), "folder for downloaded and converted models")
    offline: bool = setting(False, "never use the network: serve only models that are already on this machine")
    context: int | None = setting(
        None, "maximum sequence length in tokens (default: what the model was trained for)", low=1, high=1 << 24
    )
    dtype: str | None = setting(
        None,
        "float32, bfloat16 or float16, for weights and KV cache (default: what suits the device)",
        choices=("float32", "bfloat16", "float16"),
    )
    served_model_name: tuple[str, ...] = setting(
        (), "names to serve the model under instead of its own; answers carry the first", check=names_problem
    )
    alias: tuple[str, ...] = setting(
        (), "additional names for served models, with wildcards: claude-*=default", check=alias_problem
    )
    text_only: bool = setting(False, "serve a vision model without its vision tower, for text only")
    media_hosts: tuple[str, ...] = setting(
        (),
        "hosts that images and video may be fetched from, such as *.example.org (default: none, media must come with "
        "the request)",
        check=media_hosts_problem,
    )
    chat_template: Path | None = setting(None, "a Jinja file to use instead of the model's own chat template")
    template_history: str = setting(
        "stable",
        "stable: past turns stay in the prompt as they were computed; official: as the chat template rewrites them",
        choices=("stable", "official"),
    )
    trust_special_tokens: bool = setting(
        False,
        "let the text of control tokens, such as <|im_end|>, become those tokens in messages, tools and tool results",
    )

    tool_format: str | None = setting(
        None, "the model's tool call format (default: detected from its chat template)", check=format_problem
    )
    thinking_format: str | None = setting(
        None, "the model's thinking format (default: detected from its chat template)", check=thinking_problem
    )
    generation_config: str = setting(
        "auto",
        "where default sampling parameters come from: auto for the model's own generation_config.json, or what suits "
        "most models where it states none; none for the model's plain distribution; or a folder that has one",
        check=generation_config_problem,
    )
    override_generation_config: dict[str, Any] | None = setting(
        None,
        'default sampling parameters that override those, as JSON: {"temperature": 0.6}; temperature, top_p, top_k, '
        "min_p and repetition_penalty are supported",
        check=override_problem,
    )
    loop_guard: bool = setting(
        True,
        "end an answer that repeats the same sentences without end, unless a request says otherwise; tables, code and "
        "what the prompt quotes may repeat for longer, and structured output always",
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(
        None, "default variables of the chat template, as JSON; requests can override them", check=variables_problem
    )
    thinking: str = setting(
        "auto",
        "whether the model thinks unless a request says otherwise: on, off, or auto for what the chat template does",
        choices=("on", "off", "auto"),
    )
    thinking_budget: int | None = setting(
        None, "maximum tokens of thinking unless a request says otherwise (default: no limit)", low=0, high=1 << 24
    )
    max_tokens: int | None = setting(
        None,
        "maximum tokens of an answer unless a request says otherwise (default: what the context holds)",
        low=1,
        high=1 << 24,
    )
    hold_calls: bool = setting(
        True,
        "constrain tool calls that the model starts by itself to the tool's schema, unless a request says otherwise",
    )

    lora_modules: tuple[str, ...] = setting(
        (),
        'LoRA adapters to serve alongside the model: NAME=PATH, or {"name": "NAME", "path": "PATH"}',
        section="adapters",
        check=lora_problem,
    )
    adapter_path: Path | None = setting(
        None, "a LoRA adapter for all requests that name no other; its name is that of its folder"
    )
    max_loras: int = setting(8, "maximum number of adapters", low=1, high=256)
    max_lora_rank: int = setting(64, "maximum rank of an adapter", low=1, high=1024)
    allow_runtime_lora_updating: bool = setting(
        False,
        "allow the administrator (anyone, if there are no API keys) to load adapters from local folders and to unload "
        "them, at /v1/load_lora_adapter and /v1/unload_lora_adapter; memory for max_loras adapters is reserved",
    )

    embedding_model: str | None = setting(
        None, "an embedding model, specified like MODEL (default: none)", section="additional models"
    )
    rerank_model: str | None = setting(None, "a reranking model, specified like MODEL (default: none)")
    audio_model: str | None = setting(None, "a Whisper model for speech-to-text, specified like MODEL (default: none)")
    speech_model: str | None = setting(None, "a Kokoro model for text-to-speech, specified like MODEL (default: none)")

    models: dict[str, Any] | None = setting(
        None,
        "several models instead of MODEL: in the config file a table [models.NAME] for each, with a path; or as JSON: "
        '{"NAME": {"path": "MODEL"}}',
        section="several models",
        check=problem_from(read_model_tables),
    )
    models_config: Path | None = setting(
        None,
        "a YAML file of several models instead of MODEL: `models`, a list with a name and a path for each",
        check=problem_from(read_registry),
    )
    lazy: bool = setting(
        False,
        "load a model when a request first names it, not at startup",
    )
    idle_unload_seconds: float | None = setting(
        None,
        "unload a model this many seconds after its last request has ended (default: never)",
        low=0.0,
        high=30 * 86_400.0,
    )
    min_residency_s: float = setting(
        5.0,
        "minimum seconds that a model stays loaded before it is unloaded for another one that is waiting",
        low=0.0,
        high=86_400.0,
    )
    swap_wait_s: float = setting(
        15.0,
        "seconds for which loaded models keep accepting requests while another request waits for a model that does "
        "not fit alongside them",
        low=0.0,
        high=86_400.0,
    )

    host: str = setting(
        "127.0.0.1", "address to listen on; anything but loopback needs an API key", section="the HTTP server"
    )
    port: int = setting(8000, "port to listen on (0: any free one)", low=0, high=65535)
    api_key: str | None = setting(
        None, "API key that clients must send (Bearer or x-api-key)", secret=True, check=key_problem
    )
    api_key_file: Path | None = setting(
        None,
        "a file with more API keys: one per line or, in TOML, a table for each with a name, limits and a priority; "
        "each key is a tenant of its own, and the file is read again when it changes",
        check=key_file_problem,
    )
    admin_api_key: str | None = setting(
        None,
        "the administrator's API key: a tenant like any other that may also import cached prefixes and see totals",
        secret=True,
        check=own_key_problem,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "additional values of the Host header to accept, besides the listening address", check=host_problem
    )
    cors_origins: tuple[str, ...] = setting(
        (), "origins that browsers may call from (default: none)", check=origin_problem
    )
    strict: bool = setting(False, "refuse requests with unknown fields")
    max_connections: int = setting(
        1024,
        "maximum number of open connections, shared by keys and addresses; if none can be closed for a new one, that "
        "one gets a 503",
        low=1,
        high=1 << 20,
    )
    max_body_bytes: int = setting(16 * MIB, "maximum size of a request body", low=1, high=GIB)
    max_audio_upload_mb: int = setting(25, "maximum size of a request with audio, in megabytes", low=1, high=4096)
    max_held_bytes: int | None = setting(
        None, "maximum bytes of all request bodies in memory (default: 16 of the largest)", low=1, high=1 << 40
    )
    max_import_bytes: int = setting(
        4 * GIB, "maximum size of a file that `ingot cache import` sends", low=0, high=1 << 44
    )
    max_header_bytes: int = setting(32 * KIB, "maximum size of a request's headers", low=256, high=MIB)
    max_json_depth: int = setting(64, "maximum nesting of a JSON body", low=1, high=512)
    keepalive_s: float = setting(
        10.0, "seconds of silence after which a stream gets a keep-alive comment", low=0.01, high=3600.0
    )
    idle_event_s: float = setting(
        25.0,
        "seconds without an event after which a stream gets an empty one, for clients that ignore comments",
        low=0.01,
        high=3600.0,
    )
    idle_body_s: float = setting(
        50.0,
        "seconds after which an answer that is not streamed gets white space before its JSON, again and again, for "
        "clients and proxies that time out waiting for the first byte",
        low=0.01,
        high=3600.0,
    )
    request_timeout_s: float = setting(
        3600.0, "maximum seconds that a request may take, including its time in the queue", low=0.01, high=30 * 86400.0
    )

    drain_s: float = setting(
        5.0, "seconds that running requests get to finish when the server is stopped", low=0.0, high=86_400.0
    )

    memory: str | None = setting(
        None,
        "memory budget for weights and KV cache, such as 12GB or 60% (default: what the device can spare)",
        section="the engine",
        check=memory_problem,
    )
    expert_memory: str = setting(
        "all",
        "memory for the experts of a mixture, such as 24GB; the others are read from the model's files when they are "
        "needed, to the same answers: auto for what the budget leaves, all for a model whose weights fit",
        check=expert_memory_problem,
    )
    prefix_cache: bool = setting(True, "cache the KV of prompts and answers, for requests that share a prefix")
    cache_memory: str | None = setting(
        None,
        "the part of the budget that cached prefixes may take, such as 2GB or 30% (default: half of what is free)",
        check=memory_problem,
    )
    cache_codec: str = setting(
        "raw",
        "how cached prefixes are compressed when memory is short, and on disk: raw, affine8, affine4, turbo4 to "
        "turbo1, k8v4 (keys affine8, values turbo4), or KEYS/VALUES; all but raw are slightly lossy",
        check=codec_problem,
    )
    kv_codec: str = setting(
        "raw",
        "how the KV of running sequences is compressed, except for the newest tokens, so that more context fits in "
        "memory: the same names as for cache_codec; all but raw are slightly lossy",
        check=codec_problem,
    )
    archive_key_file: Path = setting(
        Path("~/.local/share/ingot/archive.key"),
        "the secret that authenticates records in cache_dir and the files of `ingot cache export` and `import`; "
        "created at its first use",
    )
    warm_prompts: Path | None = setting(
        None,
        "a file of prompts to compute after loading, while nothing else runs, and to pin in the cache: JSON, JSON "
        "Lines or one system prompt as text",
        check=problem_from(read_prompts),
    )
    cache_dir: Path | None = setting(
        None,
        "a folder for cached prefixes, which outlive eviction and restarts there; several servers may share it "
        "(default: none)",
    )
    cache_disk_gb: float = setting(
        10.0,
        "maximum gigabytes of all files in that folder, of every server and model",
        low=0.05,
        high=1_000_000.0,
    )
    cache_disk_free_gb: float = setting(5.0, "gigabytes of its drive to leave free", low=0.0, high=1_000_000.0)
    cache_disk_sync: bool = setting(True, "sync each written prefix to the drive, so that it survives a power loss")
    kv_events: str | None = setting(
        None,
        "a ZeroMQ endpoint, such as tcp://127.0.0.1:5557, that publishes KV cache events to routers in vLLM's format; "
        "anyone who can connect can read the tokens of prompts (default: none)",
        check=endpoint_problem,
    )
    kv_events_replay: str | None = setting(
        None, "the endpoint where subscribers request events that they missed", check=endpoint_problem
    )
    kv_events_topic: str | None = setting(
        None, "the topic that event messages begin with, such as kv@HOST@MODEL (default: empty)"
    )
    max_sequences: int = setting(32, "maximum number of sequences in a batch", low=1, high=4096)
    max_queue: int = setting(
        256, "maximum number of waiting sequences; one more is refused with 429", low=0, high=1_000_000
    )
    target_itl_ms: float = setting(
        100.0,
        "target for the time between two tokens of a stream while other requests prefill",
        low=1.0,
        high=60_000.0,
    )
    prefill_chunk: int = setting(2048, "maximum number of prompt tokens in a step", low=1, high=1 << 20)
    moe_top_k: int | None = setting(
        None,
        "let each token have only so many experts of a mixture, fewer than the model's own number: faster, but answers "
        "are others, and worse",
        low=1,
        high=1024,
    )
    speculate: str = setting(
        "auto",
        "what proposes draft tokens for speculative decoding: auto for whatever the model has, off, or some of "
        "forced, lookup, mtp, draft:MODEL, eagle:MODEL, separated by commas",
        check=speculate_problem,
    )
    speculate_tokens: int | None = setting(
        None,
        "draft tokens for a sequence at once, or fewer where there are not as many (default: what pays)",
        low=1,
        high=16,
    )
    specprefill: str = setting(
        "off",
        "compute only those tokens of a long prompt that a smaller model finds important, which is faster, but answers "
        "differ: on, for requests that ask for it; auto, also for others, where it pays by what was measured",
        choices=("off", "on", "auto"),
        switch=True,
    )
    specprefill_scorer: str = setting(
        "draft",
        "what scores the tokens: draft, a draft model; or statistics, which needs none and is less accurate",
        choices=("draft", "statistics"),
    )
    specprefill_draft_model: str | None = setting(
        None, "that draft model, specified like MODEL (default: the one that --speculate names)"
    )
    specprefill_threshold: int = setting(
        8192, "minimum number of new tokens for a prompt to be computed in part", low=1, high=1 << 24
    )
    specprefill_keep_pct: float = setting(
        0.3, "the fraction of them to compute unless a request says otherwise", low=0.01, high=1.0
    )
    specprefill_quality: float | None = setting(
        None,
        "choose the fraction for each prompt: the least with which this share of the draft model's attention stays, "
        "such as 0.95 (default: specprefill_keep_pct)",
        low=0.01,
        high=1.0,
    )
    deterministic: bool = setting(
        False,
        "give the same text whatever else is in the batch, at some cost in speed: on Linux CPUs with AMX, and on "
        "NVIDIA GPUs for models that have kernels for all their layers; accepted without effect on other CPUs, which "
        "always do",
    )

    tensor_parallel_size: int = setting(
        1,
        "number of ranks that split every layer; a rank is a process with its own GPU or machine",
        section="several ranks",
        low=1,
        high=256,
    )
    pipeline_parallel_size: int = setting(1, "number of ranks that split the model by layers", low=1, high=256)
    hosts: str | None = setting(
        None,
        "where the ranks run, the first of them on this machine: a hostfile as for `mlx.launch`, or a number of local "
        "processes (default: as many local processes as there are ranks)",
    )
    rank_stall_s: float = setting(
        60.0, "seconds that a rank may take for one step before all ranks are restarted", low=1.0, high=86_400.0
    )

    mcp_config: Path | None = setting(
        None,
        "a file of MCP servers, whose tools requests to /v1/responses may ask this server to call",
        section="tools and stored responses",
        check=mcp_problem,
    )
    responses_store: str = setting(
        "~/.local/share/ingot/responses.db", "the file in which /v1/responses are stored, or off to store none"
    )
    responses_rows: int = setting(
        10_000,
        "maximum number of stored responses; the oldest of the key that has most are removed first",
        low=1,
        high=10_000_000,
    )
    responses_bytes: int = setting(GIB, "maximum bytes of stored responses", low=MIB, high=1 << 50)
    responses_days: float = setting(30.0, "days after which a stored response is removed", low=0.001, high=36_500.0)

    capture: Path | None = setting(
        None,
        "a folder to record requests and their answers in, for `ingot replay`; anyone who can read it can read them "
        "(default: none)",
        section="recording and tracing",
    )
    capture_requests: str = setting(
        "all",
        "which requests to record: all, or asked for only those with the header `ingot-capture: on`",
        choices=("all", "asked"),
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "an OpenTelemetry collector that gets a trace of each request, such as http://127.0.0.1:4318/v1/traces "
        "(default: none; needs the extra `otel`)",
    )
    log_level: str = setting(
        "info",
        "debug, info, warning or error",
        section="the rest",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text", "text, or json: one object per line, with the request's id", choices=("text", "json")
    )


@dataclass(frozen=True, slots=True)
class Settings(SettingsTable):
    def __post_init__(self) -> None:
        for option in SETTINGS.values():
            value = option.validate(getattr(self, option.name), option.name)
            object.__setattr__(self, option.name, value)
        for name, needed in REQUIRED_SETTINGS.items():
            if getattr(self, name) != SETTINGS[name].default and getattr(self, needed) in (None, False, "off"):
                raise ConfigError(
                    f"{name} is about {needed}, which is off: switch it on, or leave {name} out", param=name
                )
        self._check_loras()
        self._check_specprefill()
        if (problem := ranks_problem(self)) is not None:
            raise ConfigError(problem)
        if self.held_bytes < self.largest_body:
            raise ConfigError(f"max_held_bytes is less than the largest body may have: {self.largest_body} bytes")
        if not self.keyed and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so an API key is needed: "
                "set INGOT_API_KEY or --api-key, or listen on 127.0.0.1"
            )

    def _check_loras(self) -> None:
        loras = self.loras
        if len(loras) > self.max_loras:
            raise ConfigError(f"{len(loras)} adapters are named, and max_loras is {self.max_loras}", param="max_loras")
        if self.adapter_path is not None and not is_lora_name(loras[-1].name):
            raise ConfigError(f"adapter_path: the folder's name, {loras[-1].name!r}, cannot name an adapter")
        if len({lora.name for lora in loras}) < len(loras):
            raise ConfigError(f"two adapters are called {loras[-1].name!r}", param="adapter_path")

    def _check_specprefill(self) -> None:
        for name in ("specprefill_draft_model", "specprefill_quality"):
            if getattr(self, name) is not None and self.specprefill_scorer != "draft":
                raise ConfigError(
                    f"specprefill_scorer {self.specprefill_scorer} uses no {name}: choose one", param=name
                )
        if (
            self.specprefill_quality is not None
            and self.specprefill_keep_pct != SETTINGS["specprefill_keep_pct"].default
        ):
            raise ConfigError(
                "specprefill_keep_pct is the same fraction for all prompts, and specprefill_quality chooses one for "
                "each: choose one",
                param="specprefill_quality",
            )

    @property
    def loras(self) -> tuple[LoraModule, ...]:
        """The adapters at startup; that of `adapter_path` is the last."""
        named = lora_modules(self.lora_modules)
        path = self.adapter_path
        return named if path is None else (*named, LoraModule(path.resolve().name, path))

    @property
    def default_lora(self) -> str | None:
        """The adapter of requests that name none."""
        return None if self.adapter_path is None else self.loras[-1].name

    @property
    def ranks(self) -> int:
        """The number of processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def responses_path(self) -> Path | None:
        """The file in which responses are stored; None if they are not."""
        return None if self.responses_store == "off" else Path(self.responses_store).expanduser()

    @property
    def held_bytes(self) -> int:
        """The most bytes of all request bodies in memory."""
        return 16 * self.largest_body if self.max_held_bytes is None else self.max_held_bytes

    @property
    def largest_body(self) -> int:
        """The most bytes of a request body that is read into memory as a whole."""
        return self.max_body_bytes if self.audio_model is None else max(self.max_body_bytes, self.max_audio_bytes)

    @property
    def max_audio_bytes(self) -> int:
        """The most bytes of a request with audio."""
        return self.max_audio_upload_mb * MIB

    @property
    def keyed(self) -> bool:
        """Whether clients must send a key."""
        return any(key is not None for key in (self.api_key, self.api_key_file, self.admin_api_key))


SETTINGS: Mapping[str, Setting] = {option.name: option for option in settings_of(Settings)}

REQUIRED_SETTINGS: Final = {
    **dict.fromkeys(("warm_prompts", "cache_dir", "cache_codec", "kv_events"), "prefix_cache"),
    **dict.fromkeys(("kv_events_replay", "kv_events_topic"), "kv_events"),
    **dict.fromkeys(("cache_disk_gb", "cache_disk_free_gb", "cache_disk_sync"), "cache_dir"),
    **dict.fromkeys(
        (f"specprefill_{name}" for name in ("scorer", "draft_model", "threshold", "keep_pct", "quality")), "specprefill"
    ),
}
"""Settings that mean nothing unless another one is set or switched on."""

NOT_WITH_RANKS: Final = {
    "lora_modules": (),
    "adapter_path": None,
    "allow_runtime_lora_updating": False,
    "models": None,
    "models_config": None,
    "lazy": False,
    "idle_unload_seconds": None,
}
"""Settings that need a whole model, or the whole KV of a sequence, in one process, and their values when unused."""


def ranks_problem(settings: Any) -> str | None:
    if settings.ranks == 1:
        return None
    if settings.tensor_parallel_size > 1 and settings.pipeline_parallel_size > 1:
        return "tensor_parallel_size and pipeline_parallel_size cannot both be more than 1: choose one"
    for name, unused in NOT_WITH_RANKS.items():
        if getattr(settings, name) != unused:
            return f"{name} is not supported with several ranks: leave it out, or run the model on one rank"
    proposers = [word.strip().partition(":")[0] for word in settings.speculate.split(",")]
    if "eagle" in proposers and settings.pipeline_parallel_size > 1:
        return (
            "speculate eagle is not supported with pipeline_parallel_size: it reads outputs of layers that other ranks "
            "have. Use tensor_parallel_size, or another proposer"
        )
    return None

"""The settings: every field with its default, help text and limits, in the order of `--help`.

A `Settings` that exists is valid: every limit is checked when one is made, whoever makes it, and so is what settings
say together, as several ranks do with what they exclude.
"""

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
    speculate_problem,
    thinking_problem,
    variables_problem,
)
from ingot.config.field import Setting, setting, settings_of
from ingot.config.keys import key_file_problem, key_problem, own_key_problem
from ingot.config.model_tables import model_tables_problem, registry_problem
from ingot.errors import ConfigError
from ingot.text.input_files import generation_config_problem, prompt_file_problem

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class SettingsTable:
    """Made as `Settings` alone, which checks them."""

    model: str = setting(
        DEFAULT_MODEL,
        "local folder, .gguf file, hub id, or the name of a packaged model",
        section="the model",
        positional="MODEL",
    )
    models_dir: Path = setting(Path("~/.cache/ingot/models"), "where fetched and converted models are kept")  # noqa: RUF009
    offline: bool = setting(False, "never use the network: only models that are already here")
    context: int | None = setting(
        None, "longest sequence, in tokens (default: what the model was trained for)", low=1, high=1 << 24
    )
    dtype: str | None = setting(
        None,
        "float32, bfloat16 or float16, of weights and states (default: what suits the device)",
        choices=("float32", "bfloat16", "float16"),
    )
    served_model_name: tuple[str, ...] = setting(
        (), "names to serve the model under instead of its own; answers carry the first", check=names_problem
    )
    alias: tuple[str, ...] = setting(
        (), "further names, also patterns, for served models: claude-*=default", check=alias_problem
    )
    text_only: bool = setting(False, "serve a model that takes pictures without its vision tower, for text alone")
    media_hosts: tuple[str, ...] = setting(
        (),
        "hosts that pictures and clips may be fetched from, also *.example.org; by default none, and files come with "
        "the request",
        check=media_hosts_problem,
        also=("--allowed-media-domains",),
    )
    chat_template: Path | None = setting(None, "a Jinja file to use instead of the model's own chat template")  # noqa: RUF009
    template_history: str = setting(
        "stable",
        "stable: past turns stay in the prompt as they were computed; official: as the chat template rewrites them",
        choices=("stable", "official"),
    )
    trust_special_tokens: bool = setting(
        False,
        "let the text of control tokens, such as <|im_end|>, in messages, tools and their results be those tokens",
    )

    tool_format: str | None = setting(
        None, "how the model writes tool calls (default: what its chat template shows)", check=format_problem
    )
    thinking_format: str | None = setting(
        None, "how the model marks its thinking (default: what its chat template shows)", check=thinking_problem
    )
    generation_config: str = setting(
        "auto",
        "whose generation_config.json says how tokens are chosen where a request does not: auto for the model's own, "
        "none, or a folder",
        check=generation_config_problem,
    )
    override_generation_config: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        'what to use instead of it, as JSON: {"temperature": 0.6}; known are temperature, top_p, top_k, min_p and '
        "repetition_penalty",
        check=override_problem,
    )
    default_chat_template_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009
        None, "variables of the chat template, as JSON, where a request does not set them", check=variables_problem
    )
    thinking: str = setting(
        "auto",
        "on, off, or auto for what the chat template does, where a request says nothing",
        choices=("on", "off", "auto"),
    )
    thinking_budget: int | None = setting(
        None, "most tokens of thinking, where a request says nothing (default: no limit)", low=0, high=1 << 24
    )
    hold_calls: bool = setting(
        True, "hold a tool call that the model has begun by itself to the tool's schema, where a request says nothing"
    )

    lora_modules: tuple[str, ...] = setting(
        (),
        'LoRA adapters to serve beside the model: NAME=PATH, or {"name": "NAME", "path": "PATH"}',
        section="adapters",
        check=lora_problem,
    )
    adapter_path: Path | None = setting(  # noqa: RUF009
        None, "a LoRA adapter that all requests go through that name no other, called as its folder is"
    )
    max_loras: int = setting(8, "most adapters at once", low=1, high=256)
    max_lora_rank: int = setting(64, "highest rank of an adapter", low=1, high=1024)
    allow_runtime_lora_updating: bool = setting(
        False,
        "let the administrator's key (without keys, anybody) load adapters from this machine's folders, and unload "
        "them, at /v1/load_lora_adapter and /v1/unload_lora_adapter; memory for all of them is set aside",
    )

    embedding_model: str | None = setting(
        None, "a model that makes vectors of texts, given like MODEL (none by default)", section="further models"
    )
    rerank_model: str | None = setting(
        None, "a model that scores documents against a query, given like MODEL (none by default)"
    )
    audio_model: str | None = setting(
        None, "a Whisper model that writes down what is spoken, given like MODEL (none by default)"
    )
    speech_model: str | None = setting(
        None, "a Kokoro model that speaks what is written, given like MODEL (none by default)"
    )

    models: dict[str, Any] | None = setting(  # noqa: RUF009
        None,
        "several models instead of MODEL, each a table [models.NAME] of the file with a path, or as JSON: "
        '{"NAME": {"path": "MODEL"}}',
        section="several models",
        check=model_tables_problem,
    )
    models_config: Path | None = setting(  # noqa: RUF009
        None, "the same as a YAML file: models, a list with a name and a path each", check=registry_problem
    )
    lazy: bool = setting(
        False,
        "load a model when a request first names it, not at the start",
        also=("--lazy-load-model",),
    )
    idle_unload_seconds: float | None = setting(
        None,
        "unload a model that nobody asked for so long, counted from the end of the last request (default: never)",
        low=0.0,
        high=30 * 86_400.0,
        also=("--auto-unload-idle-seconds",),
    )
    min_residency_s: float = setting(
        5.0,
        "seconds that a model stays loaded at least, before it makes room for another one that waits",
        low=0.0,
        high=86_400.0,
    )
    swap_wait_s: float = setting(
        15.0,
        "seconds for which models that are loaded take on everybody, though a request waits for one that has no room "
        "beside them",
        low=0.0,
        high=86_400.0,
    )

    hosts: str | None = setting(
        None,
        "what runs the ranks of one model, the first of them on this machine: a hostfile as `mlx.launch` reads it, or "
        "how many run here (by default as many as tensor_parallel_size and pipeline_parallel_size ask for)",
        section="processes of one model",
    )
    rank_stall_s: float = setting(
        60.0, "seconds that a rank may be at one step before all of them are started again", low=1.0, high=86_400.0
    )
    host: str = setting("127.0.0.1", "address to listen on; anything but loopback needs an API key", section="the door")
    port: int = setting(8000, "port to listen on (0: any free one)", low=0, high=65535)
    api_key: str | None = setting(
        None, "key that clients must send (Bearer or x-api-key)", secret=True, check=key_problem
    )
    api_key_file: Path | None = setting(  # noqa: RUF009
        None,
        "a file of further keys: one a line or, in TOML, a table each with a name, limits and a priority; each key is "
        "a tenant of its own, and a changed file is read again",
        check=key_file_problem,
    )
    admin_api_key: str | None = setting(
        None,
        "the administrator's key: a tenant like any other, who may also import kept prompts and see totals",
        secret=True,
        check=own_key_problem,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "extra Host names to answer to, besides the listening address", check=host_problem
    )
    cors_origins: tuple[str, ...] = setting(
        (), "origins that browsers may call from (none by default)", check=origin_problem
    )
    strict: bool = setting(False, "refuse requests that hold an unknown field")
    max_connections: int = setting(
        1024,
        "most connections open at once, shared by keys and addresses; where none gives way, one more gets a 503",
        low=1,
        high=1 << 20,
    )
    max_body_bytes: int = setting(16 * MIB, "largest request body", low=1, high=GIB)
    max_audio_upload_mb: int = setting(25, "largest request with a sound, in megabytes", low=1, high=4096)
    max_held_bytes: int | None = setting(
        None, "most bytes of request bodies held at once (default: 16 of the largest)", low=1, high=1 << 40
    )
    max_import_bytes: int = setting(4 * GIB, "largest file that `ingot cache import` may send", low=0, high=1 << 44)
    max_header_bytes: int = setting(32 * KIB, "largest request head", low=256, high=MIB)
    max_json_depth: int = setting(64, "deepest nesting of a JSON body", low=1, high=512)
    keepalive_s: float = setting(
        10.0, "seconds of silence after which a stream gets a keep-alive comment", low=0.01, high=3600.0
    )
    idle_event_s: float = setting(
        25.0,
        "seconds without an event after which a stream gets an empty one, for clients that heed no comments",
        low=0.01,
        high=3600.0,
    )
    idle_body_s: float = setting(
        50.0,
        "seconds after which an answer that is not streamed gets white space before its JSON, and as often again, for "
        "clients and proxies that wait no longer for the first byte",
        low=0.01,
        high=3600.0,
    )
    request_timeout_s: float = setting(
        3600.0, "longest time a request may take, queueing included", low=0.01, high=30 * 86400.0
    )

    drain_s: float = setting(
        5.0, "seconds that running requests get to finish once the server is told to stop", low=0.0, high=86_400.0
    )

    memory: str | None = setting(
        None,
        "memory budget for weights and sequences, such as 12GB or 60% (default: what the device can spare)",
        section="the engine",
        check=memory_problem,
    )
    prefix_cache: bool = setting(True, "keep what was computed of prompts and answers, for requests that begin alike")
    cache_memory: str | None = setting(
        None,
        "the part of the budget that kept prefixes may take, such as 2GB or 30% (default: half of what is free)",
        check=memory_problem,
    )
    cache_codec: str = setting(
        "raw",
        "what kept prefixes are put into when memory is short, and on disk: raw, affine8, affine4, turbo4 to turbo1, "
        "k8v4 (keys affine8, values turbo4), or KEYS/VALUES; all but raw lose a little",
        check=codec_problem,
    )
    kv_codec: str = setting(
        "raw",
        "what keys and values of running sequences are put into, all but a tail of the newest, so that more context "
        "fits in the same memory: the same names as for cache_codec; all but raw lose a little",
        check=codec_problem,
    )
    archive_key_file: Path = setting(  # noqa: RUF009
        Path("~/.local/share/ingot/archive.key"),
        "the secret that records in cache_dir and files of `ingot cache export` are sealed with, and import asks for; "
        "made at its first use",
    )
    warm_prompts: Path | None = setting(  # noqa: RUF009
        None,
        "a file of prompts to compute once the model is loaded and nothing else runs, and to keep: JSON, JSON "
        "Lines or one system prompt as text",
        check=prompt_file_problem,
    )
    cache_dir: Path | None = setting(  # noqa: RUF009
        None,
        "a folder in which kept prefixes outlast memory and restarts; several servers may share one (none by default)",
        also=("--ssd-cache-dir",),
    )
    cache_disk_gb: float = setting(
        10.0,
        "most gigabytes of all files in that folder, whosever they are",
        low=0.05,
        high=1_000_000.0,
        also=("--ssd-cache-max-gb",),
    )
    cache_disk_free_gb: float = setting(5.0, "gigabytes of its drive that are to stay free", low=0.0, high=1_000_000.0)
    cache_disk_sync: bool = setting(
        True, "wait for the drive when a prefix is written, so that it is there after a loss of power too"
    )
    kv_events: str | None = setting(
        None,
        "where routers are told which prompts could be taken over, as vLLM's subscribers expect it: a ZeroMQ endpoint "
        "such as tcp://127.0.0.1:5557. Whoever reaches it can read prompts' tokens (none by default)",
        check=endpoint_problem,
    )
    kv_events_replay: str | None = setting(
        None, "the endpoint that answers who has missed some of it", check=endpoint_problem
    )
    kv_events_topic: str | None = setting(
        None, "what each of its messages begins with, such as kv@HOST@MODEL (nothing by default)"
    )
    max_sequences: int = setting(32, "most sequences computed together", low=1, high=4096)
    max_queue: int = setting(256, "most sequences waiting; one more is refused with 429", low=0, high=1_000_000)
    target_itl_ms: float = setting(
        100.0,
        "longest wanted time between two tokens of a stream while others prefill",
        low=1.0,
        high=60_000.0,
    )
    prefill_chunk: int = setting(2048, "most prompt tokens computed in one step", low=1, high=1 << 20)
    speculate: str = setting(
        "auto",
        "who guesses tokens ahead, for the model to check: auto for whatever it has, off, or some of forced, lookup, "
        "mtp, draft:MODEL, eagle:MODEL, joined by commas",
        check=speculate_problem,
    )
    speculate_tokens: int | None = setting(
        None, "tokens guessed ahead for an answer at once, or as many as can be (default: what pays)", low=1, high=16
    )
    specprefill: bool = setting(
        False,
        "let requests ask for long prompts to be computed in part, what a smaller model finds to matter: faster, and "
        "not the same answers",
    )
    specprefill_scorer: str = setting(
        "draft",
        "who finds out what matters: draft, or statistics, which reads nothing and is right less often",
        choices=("draft", "statistics"),
    )
    specprefill_draft_model: str | None = setting(
        None, "that smaller model, given like MODEL (default: the draft that --speculate names)"
    )
    specprefill_threshold: int = setting(
        8192, "new tokens of a prompt from which on not all of them are computed", low=1, high=1 << 24
    )
    specprefill_keep_pct: float = setting(
        0.3, "the share of them that is, where a request does not say", low=0.01, high=1.0
    )
    deterministic: bool = setting(
        False, "on Linux CPUs, compute a token in one way however many are computed with it: the same text, slower"
    )

    tensor_parallel_size: int = setting(
        1,
        "ranks, processes with a GPU or a machine each, of which each has a part of every layer",
        section="one model over several ranks",
        low=1,
        high=256,
        also=("-tp",),
    )
    pipeline_parallel_size: int = setting(
        1, "ranks of which each has some of the layers", low=1, high=256, also=("-pp",)
    )

    mcp_config: Path | None = setting(  # noqa: RUF009
        None,
        "a file of MCP servers, whose tools requests to /v1/responses may ask this server to call",
        section="tools and stored responses",
        check=mcp_problem,
    )
    responses_store: str = setting(
        "~/.local/share/ingot/responses.db",
        "the file in which /v1/responses are stored, or off to store none",
        section="stored responses",
    )
    responses_rows: int = setting(
        10_000, "most stored responses; of the key with most, the oldest go first", low=1, high=10_000_000
    )
    responses_bytes: int = setting(GIB, "most bytes of stored responses", low=MIB, high=1 << 50)
    responses_days: float = setting(30.0, "days after which a stored response is forgotten", low=0.001, high=36_500.0)

    capture: Path | None = setting(  # noqa: RUF009
        None,
        "a folder in which requests are written down with their answers, for `ingot replay`: whoever reads it reads "
        "them (none by default)",
        section="the rest",
    )
    capture_requests: str = setting(
        "all",
        "which requests are written down there: all, or asked for those alone that come with the header "
        "`ingot-capture: on`",
        choices=("all", "asked"),
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "an OpenTelemetry collector that is told of each request when it has ended, such as "
        "http://127.0.0.1:4318/v1/traces (none by default; needs the extra `otel`)",
    )
    log_level: str = setting(
        "info",
        "debug, info, warning or error",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text", "text, or json: an object a line, with the request's id", choices=("text", "json")
    )


@dataclass(frozen=True, slots=True)
class Settings(SettingsTable):
    def __post_init__(self) -> None:
        for known in SETTINGS.values():
            value = known.checked(getattr(self, known.name), known.name)
            object.__setattr__(self, known.name, value)
        if self.warm_prompts is not None and not self.prefix_cache:
            raise ConfigError("warm_prompts keeps what it computes, which prefix_cache = false forbids: choose one")
        if self.cache_dir is not None and not self.prefix_cache:
            raise ConfigError("cache_dir keeps prefixes on disk, which prefix_cache = false forbids: choose one")
        if self.cache_codec != "raw" and not self.prefix_cache:
            raise ConfigError("cache_codec is about kept prefixes, which prefix_cache = false forbids: choose one")
        if self.kv_events is not None and not self.prefix_cache:
            raise ConfigError("kv_events tells of kept prefixes, which prefix_cache = false forbids: choose one")
        for name in ("kv_events_replay", "kv_events_topic"):
            if self.kv_events is None and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about kv_events, which says no endpoint: give one", param=name)
        self._check_disk_settings()
        self._check_loras()
        self._check_specprefill_scorer()
        if (problem := ranks_problem(self)) is not None:
            raise ConfigError(problem)
        if self.held_bytes < self.largest_body:
            raise ConfigError(f"max_held_bytes is less than one body may have: {self.largest_body} bytes")
        if not self.keyed and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so an API key is needed: "
                "set INGOT_API_KEY or --api-key, or listen on 127.0.0.1"
            )

    def _check_disk_settings(self) -> None:
        """Settings of the cache's folder mean nothing without one."""
        for name in ("cache_disk_gb", "cache_disk_free_gb", "cache_disk_sync"):
            if self.cache_dir is None and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about the folder that cache_dir names: name one", param=name)

    def _check_loras(self) -> None:
        loras = self.loras
        if len(loras) > self.max_loras:
            raise ConfigError(f"{len(loras)} adapters are named, and max_loras is {self.max_loras}", param="max_loras")
        if self.adapter_path is not None and not is_lora_name(loras[-1].name):
            raise ConfigError(f"adapter_path: its folder's name, {loras[-1].name!r}, is none for an adapter")
        if len({lora.name for lora in loras}) < len(loras):
            raise ConfigError(f"two adapters are called {loras[-1].name!r}", param="adapter_path")

    @property
    def loras(self) -> tuple[LoraModule, ...]:
        """All adapters to begin with; that of `adapter_path` is the last."""
        named = lora_modules(self.lora_modules)
        own = self.adapter_path
        return named if own is None else (*named, LoraModule(own.resolve().name, own))

    @property
    def default_lora(self) -> str | None:
        """The adapter of requests that name none."""
        return None if self.adapter_path is None else self.loras[-1].name

    def _check_specprefill_scorer(self) -> None:
        """Settings of sparse prefill mean nothing without it, nor does a draft where none is asked."""
        for name in ("scorer", "draft_model", "threshold", "keep_pct"):
            name = f"specprefill_{name}"
            if not self.specprefill and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about specprefill, which is off: switch it on", param=name)
        if self.specprefill_draft_model is not None and self.specprefill_scorer != "draft":
            raise ConfigError(
                f"specprefill_draft_model names a model that specprefill_scorer {self.specprefill_scorer} does not "
                "ask: choose one",
                param="specprefill_draft_model",
            )

    @property
    def ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def responses_path(self) -> Path | None:
        """Where responses are stored; None where none are."""
        return None if self.responses_store == "off" else Path(self.responses_store).expanduser()

    @property
    def held_bytes(self) -> int:
        """The most bytes of request bodies held at once."""
        return 16 * self.largest_body if self.max_held_bytes is None else self.max_held_bytes

    @property
    def largest_body(self) -> int:
        """The most bytes of a request body that is held whole."""
        return self.max_body_bytes if self.audio_model is None else max(self.max_body_bytes, self.max_audio_bytes)

    @property
    def max_audio_bytes(self) -> int:
        """The most bytes of a request with a sound."""
        return self.max_audio_upload_mb * MIB

    @property
    def keyed(self) -> bool:
        """Whether clients must send a key."""
        return any(given is not None for given in (self.api_key, self.api_key_file, self.admin_api_key))


SETTINGS: Mapping[str, Setting] = {known.name: known for known in settings_of(Settings)}


NOT_WITH_RANKS: Final = {
    "lora_modules": (),
    "adapter_path": None,
    "allow_runtime_lora_updating": False,
    "models": None,
    "models_config": None,
    "lazy": False,
    "idle_unload_seconds": None,
}
"""Settings that need a whole model, or a whole row's states, in one place, and what they are without."""


def ranks_problem(settings: Any) -> str | None:
    """Of all settings together."""
    if settings.ranks == 1:
        return None
    if settings.tensor_parallel_size > 1 and settings.pipeline_parallel_size > 1:
        return "tensor_parallel_size and pipeline_parallel_size cannot both be more than 1: choose one"
    for name, without in NOT_WITH_RANKS.items():
        if getattr(settings, name) != without:
            return f"{name} is not supported with several ranks: leave it out, or run the model on one"
    proposers = [word.strip().partition(":")[0] for word in settings.speculate.split(",")]
    if "eagle" in proposers and settings.pipeline_parallel_size > 1:
        return (
            "speculate eagle is not supported with pipeline_parallel_size: it reads what layers give that other ranks "
            "have. Use tensor_parallel_size, or another proposer"
        )
    return None

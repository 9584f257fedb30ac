"""The table of operations: every method and path, with its protocol, body and answer; and the headers of answers.

Light to import: a server is ready before it has imported the modules that the rows name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal

BODY_ERRORS: Final = (400, 404, 408, 413, 415)
ENGINE_ERRORS: Final = (429, 499, 503, 504)
LOOKUP_ERRORS: Final = (400, 404, 503)
RESPONSE_PATH: Final = "/v1/responses/{response_id}"
IMPORT_PATH: Final = "/v1/cache/import"
FILE: Final = "application/octet-stream"
PLAIN_ID: Final = "req-"
TRANSCRIPTS: Final = ("text/plain", "application/x-subrip", "text/vtt")

Reference = str
"""`module:name`, of this package."""
Work = Literal["generate", "encode", "transcribe", "speak", "read", "own"]
"""The endpoint: one that all protocols share, or the operation's own."""
FramingName = Literal["events", "chunks", "named events", "lines"]


@cache
def load(reference: Reference) -> Any:
    """The object that a row names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"ingot.protocol.{module}"), name)


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol: the prefix of its paths, and the format of its errors and streams."""

    prefix: str
    error: Reference  # the class of an error's body
    framing: FramingName = "events"
    fault: Reference | None = None  # the class of the event of a stream that failed before it began; None: `error`
    alive: Reference | None = None  # the keep-alive event; None: the framing's own
    id_header: str = ""  # in which its clients expect a request's id


OPENAI: Final = Wire("", "errors:ErrorBody")
"""Also of our own paths."""
ANTHROPIC: Final = Wire(
    *("/v1/messages", "errors:AnthropicError", "named events"),
    alive="anthropic.answers:MessagePing",
    id_header="request-id",
)
RESPONSES: Final = Wire("/v1/responses", "errors:ErrorBody", "named events", "errors:StreamFault")
OLLAMA: Final = Wire("/api", "errors:OllamaError", "lines")
WIRES: Final = (ANTHROPIC, RESPONSES, OLLAMA, OPENAI)


def wire_at(path: str) -> Wire:
    """The protocol that a path belongs to, whether or not it exists."""
    return next(wire for wire in WIRES if path == wire.prefix or path.startswith(f"{wire.prefix}/") or not wire.prefix)


@dataclass(frozen=True, slots=True)
class Shape:
    """The body and the answer of an operation."""

    answer: Reference | None = None  # None: a file, or text of another `media` type
    body: Reference | None = None  # JSON, or a form with a file
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: Reference | None = None  # of the answer where it is streamed; one class, or several
    events: Reference | None = None  # of the answer where it is streamed as named events
    query: Reference | None = None  # the parameters after the path
    texts: tuple[str, ...] | Reference = ()  # media types that the answer may have instead; or a mapping to them
    media: str = FILE  # of an answer that is not JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    name: str
    method: str
    path: str
    summary: str
    shape: Shape
    errors: tuple[int, ...] = ()
    takes: Literal["json", "form", "file"] | None = None  # its body
    public: bool = False  # it needs no key
    kind: str = "chat"  # of the model; or `any`, or the `server` itself
    work: Work = "own"
    reader: Reference | None = None  # turns a decoded body into the engine's task, or into the answer
    id_prefix: str = PLAIN_ID  # of the request's id, and so of the answer's
    framing: FramingName = "events"  # of its stream
    begins: Literal["if streamed", "unless refused"] | None = None  # when its stream may begin before the model loads
    span: str = ""  # its name in OpenTelemetry's conventions, if it has one

    @property
    def runs(self) -> bool:
        """Whether it uses an engine."""
        return set(ENGINE_ERRORS) <= set(self.errors)

    @property
    def wire(self) -> Wire:
        return wire_at(self.path)


def engine_operation(
    name: str, path: str, summary: str, reader: Reference | None, shape: Shape, work: Work = "generate", **more: Any
) -> Operation:
    """A body for an engine."""
    columns = {"takes": "json", "span": "chat", "framing": wire_at(path).framing, **more}
    errors = BODY_ERRORS + ENGINE_ERRORS
    return Operation(name, "POST", path, summary, shape, errors, work=work, reader=reader, **columns)


def body_operation(
    name: str, path: str, summary: str, shape: Shape, reader: Reference | None = None, **more: Any
) -> Operation:
    """A body without an engine."""
    columns = {"errors": BODY_ERRORS, "work": "own" if reader is None else "read", **more}
    return Operation(name, "POST", path, summary, shape, takes="json", reader=reader, **columns)


def get_operation(
    name: str, path: str, summary: str, shape: Shape | Reference, *errors: int, method: str = "GET", **more: Any
) -> Operation:
    """Without a body; of the whole server unless `kind` is set."""
    shape = shape if isinstance(shape, Shape) else Shape(shape)
    return Operation(name, method, path, summary, shape, errors, **{"kind": "server", **more})


def model_change_operation(name: str, what: str, summary: str) -> Operation:
    return get_operation(
        name, f"/v1/models/{{model}}/{what}", summary, Shape(MODEL_BODY), *LOOKUP_ERRORS, method="POST"
    )


def form_operation(name: str, what: str, summary: str, reader: str) -> Operation:
    """A form with an audio file."""
    module = "openai.transcriptions"
    form = f"{module}:{what.removesuffix('s').upper()}_FORM"
    shape = Shape(f"{module}:Transcription", form, chunk=f"{module}:TRANSCRIPT_CHUNKS", texts=TRANSCRIPTS)
    more = {"takes": "form", "kind": "audio", "span": "transcription"}
    return engine_operation(name, f"/v1/audio/{what}", summary, f"{module}:{reader}", shape, "transcribe", **more)


def rerank_operation(name: str, path: str, reader: Reference) -> Operation:
    shape, summary = (
        Shape("pooling:RerankAnswer", "pooling:RERANK_BODY"),
        "Rank documents by how well they answer a query.",
    )
    return engine_operation(name, path, summary, reader, shape, "encode", kind="rerank", span="rerank")


def probe_operation(name: str, path: str, summary: str) -> Operation:
    return get_operation(name, path, summary, Shape("ingot_api.health:HealthBody", other_answers=(503,)), public=True)


VECTORS: Final[dict[str, Any]] = {"work": "encode", "kind": "embedding", "span": "embeddings"}
COMPLETION: Final = "openai.completions:Completion"
RESPONSE_BODY: Final = "responses.answers:ResponseBody"
MODEL_BODY: Final = "model_listings:ModelBody"
AUDIO_TYPES: Final = "openai.speech:AUDIO_MEDIA_TYPES"

OPERATIONS: Final = (
    # OpenAI's, and llama.cpp's
    engine_operation(
        *("createChatCompletion", "/v1/chat/completions", "Answer a conversation.", "openai.chat:read_chat"),
        Shape("openai.chat_answers:ChatCompletion", "openai.chat:CHAT_BODY", chunk="openai.chat_answers:ChatChunk"),
        id_prefix="chatcmpl-",
        begins="if streamed",
    ),
    engine_operation(
        *("createCompletion", "/v1/completions", "Continue a text.", "openai.completions:read_completion"),
        Shape(COMPLETION, "openai.completions:COMPLETION_BODY", chunk=COMPLETION),
        id_prefix="cmpl-",
        begins="if streamed",
        span="text_completion",
    ),
    engine_operation(
        *("infill", "/infill", "Fill in between two texts, in llama.cpp's format.", "infill:read_infill"),
        Shape("infill:InfillAnswer", "infill:INFILL_BODY", chunk="infill:InfillAnswer"),
        framing="chunks",
    ),
    # Anthropic's
    engine_operation(
        *("createMessage", "/v1/messages", "Answer a conversation, in Anthropic's format."),
        "anthropic.request:read_messages",
        Shape(
            *("anthropic.answers:MessageBody", "anthropic.request:MESSAGES_BODY"),
            events="anthropic.answers:MESSAGE_EVENTS",
        ),
        id_prefix="msg_",
        begins="if streamed",
    ),
    body_operation(
        *("countMessageTokens", "/v1/messages/count_tokens", "Count the tokens of a conversation's prompt."),
        Shape("anthropic.request:MessageTokenCount", "anthropic.request:COUNT_TOKENS_BODY"),
        "anthropic.request:count_message_tokens",
    ),
    # Pooling models
    engine_operation(
        *("createEmbedding", "/v1/embeddings", "Compute an embedding of each text.", "pooling:read_embeddings"),
        Shape("pooling:EmbeddingList", "pooling:EMBEDDING_BODY"),
        **VECTORS,
    ),
    rerank_operation("rerank", "/v1/rerank", "pooling:read_rerank"),
    rerank_operation("rerankV2", "/v2/rerank", "pooling:read_rerank_v2"),
    # Responses
    engine_operation(
        *("createResponse", "/v1/responses", "Answer a conversation of items.", None),
        Shape(RESPONSE_BODY, "responses.request:RESPONSES_BODY", events="responses.answers:ResponseEvent"),
        work="own",
        id_prefix="resp_",
        begins="if streamed",
    ),
    body_operation(
        *("countResponseTokens", "/v1/responses/input_tokens", "Count the tokens of a response's prompt."),
        Shape("responses.answers:ResponseTokens", "responses.request:RESPONSES_BODY"),
        errors=(*BODY_ERRORS, 503),
    ),
    get_operation(
        *("retrieveResponse", RESPONSE_PATH, "Get a response that is stored or in progress."),
        Shape(RESPONSE_BODY, query="responses.request:RESPONSE_QUERY"),
        *LOOKUP_ERRORS,
    ),
    get_operation(
        *("deleteResponse", RESPONSE_PATH, "Delete a response.", Shape("responses.answers:DeletedResponse"), 404, 503),
        method="DELETE",
    ),
    get_operation(
        *("cancelResponse", f"{RESPONSE_PATH}/cancel", "Cancel a response that is in progress.", Shape(RESPONSE_BODY)),
        *LOOKUP_ERRORS,
        method="POST",
    ),
    get_operation(
        *("listInputItems", f"{RESPONSE_PATH}/input_items", "List the input items of a response."),
        Shape("responses.answers:InputItemList", query="responses.request:ITEMS_QUERY"),
        *LOOKUP_ERRORS,
    ),
    get_operation(
        *("listMcpServers", "/v1/mcp", "List the connected MCP servers and their tools."),
        "responses.answers:McpServerList",
    ),
    # Speech
    form_operation("createTranscription", "transcriptions", "Transcribe audio.", "read_transcription"),
    form_operation("createTranslation", "translations", "Translate audio to English.", "read_translation"),
    engine_operation(
        *("createSpeech", "/v1/audio/speech", "Convert a text to speech.", "openai.speech:read_speech"),
        Shape(None, "openai.speech:SPEECH_BODY", chunk="openai.speech:SPEECH_CHUNKS", texts=AUDIO_TYPES),
        work="speak",
        kind="speech",
        span="speech",
    ),
    get_operation("listVoices", "/v1/audio/voices", "List the voices.", "openai.speech:VoiceList", kind="speech"),
    # Models
    get_operation("listModels", "/v1/models", "List the served models.", "model_listings:ModelList"),
    body_operation(
        *("addModel", "/v1/models", "Fetch a model, load it and serve it until the end; for the administrator's key."),
        Shape(MODEL_BODY, "model_listings:ADD_MODEL_BODY"),
        kind="server",
        errors=(*BODY_ERRORS, 403, 503),
    ),
    get_operation(
        "listRecommended",
        "/v1/models/recommended",
        "Models that there is memory for; for the administrator's key.",
        "model_listings:RecommendedList",
        403,
    ),
    get_operation("retrieveModel", "/v1/models/{model}", "Get a served model.", MODEL_BODY, 404),
    model_change_operation(
        "loadModel", "load", "Load a model, and wait until it is loaded; for the administrator's key."
    ),
    model_change_operation(
        "unloadModel", "unload", "Let a model finish its requests, and unload it; for the administrator's key."
    ),
    model_change_operation(
        "swapModel", "swap", "Load a model in place of all that are not pinned; for the administrator's key."
    ),
    body_operation(
        *("tokenize", "/v1/tokenize", "Tokenize a text or a conversation."),
        Shape("ingot_api.tokenize:TokenizeAnswer", "ingot_api.tokenize:TOKENIZE_BODY"),
        "ingot_api.tokenize:answer_tokenize",
    ),
    body_operation(
        *("detokenize", "/v1/detokenize", "Convert tokens to a text."),
        Shape("ingot_api.tokenize:DetokenizeAnswer", "ingot_api.tokenize:DETOKENIZE_BODY"),
        "ingot_api.tokenize:answer_detokenize",
    ),
    # Ollama's
    engine_operation(
        *("ollamaChat", "/api/chat", "Answer a conversation, in Ollama's format.", "ollama.request:read_ollama_chat"),
        Shape(
            "ollama.answers:OllamaChatAnswer",
            "ollama.request:OLLAMA_CHAT_BODY",
            chunk="ollama.answers:OllamaChatAnswer",
        ),
        begins="unless refused",
    ),
    engine_operation(
        *(
            "ollamaGenerate",
            "/api/generate",
            "Answer a prompt, in Ollama's format.",
            "ollama.request:read_ollama_generate",
        ),
        Shape(
            "ollama.answers:OllamaCompletionAnswer",
            "ollama.request:OLLAMA_GENERATE_BODY",
            chunk="ollama.answers:OllamaCompletionAnswer",
        ),
        begins="unless refused",
        span="text_completion",
    ),
    engine_operation(
        *("ollamaEmbed", "/api/embed", "Compute embeddings of texts, in Ollama's format.", "pooling:read_ollama_embed"),
        Shape("pooling:OllamaEmbedded", "pooling:OLLAMA_EMBED_BODY"),
        **VECTORS,
    ),
    engine_operation(
        *("ollamaEmbeddings", "/api/embeddings", "Compute the embedding of a text, in Ollama's older format."),
        "pooling:read_ollama_old_embedding",
        Shape("pooling:OllamaOldEmbedding", "pooling:OLLAMA_OLD_EMBEDDING_BODY"),
        **VECTORS,
    ),
    body_operation(
        *("ollamaShow", "/api/show", "Describe a model, in Ollama's format."),
        Shape("model_listings:OllamaShown", "model_listings:OLLAMA_SHOW_BODY"),
        "model_listings:show_ollama_model",
        kind="any",
    ),
    get_operation(
        "ollamaTags", "/api/tags", "List the served models, in Ollama's format.", "model_listings:OllamaTags"
    ),
    get_operation(
        "ollamaRunning", "/api/ps", "List the loaded models, in Ollama's format.", "model_listings:OllamaRunning"
    ),
    get_operation("ollamaVersion", "/api/version", "The version of Ollama's protocol.", "model_listings:OllamaVersion"),
    # Our own
    get_operation(
        "listRequests",
        "/v1/requests",
        "List the running requests and their progress.",
        "ingot_api.requests:RunningRequestList",
    ),
    get_operation(
        *("retrieveRequest", "/v1/requests/{id}"),
        "The progress of a running request, or the receipt of one that ended recently.",
        "ingot_api.requests:RequestStatusBody",
        404,
    ),
    get_operation(
        *(
            "cancelRequest",
            "/v1/requests/{id}",
            "Cancel a running request.",
            Shape("ingot_api.requests:CancelledRequestBody"),
            404,
        ),
        method="DELETE",
    ),
    get_operation(
        *("showLive", "/v1/live", "The state of the engine now and recently, for the web page."),
        "ingot_api.requests:LiveBody",
    ),
    get_operation(
        *("showCacheTree", "/v1/cache/tree", "The tree of cached prefixes, and how often they were used."),
        "ingot_api.cache:CacheTreeBody",
    ),
    get_operation(
        "showCache", "/v1/cache", "The contents of the prefix cache.", "ingot_api.cache:CacheBody", kind="chat"
    ),
    get_operation(
        *("clearCache", "/v1/cache", "Delete all cached prompts of the request's key."),
        "ingot_api.cache:ClearedBody",
        method="DELETE",
        kind="chat",
    ),
    body_operation(
        *("explainCache", "/v1/cache/explain", "What a request would reuse now, and why no more."),
        Shape("ingot_api.cache:ExplainedBody", "ingot_api.cache:EXPLAIN_BODY"),
    ),
    get_operation(
        *("exportCache", "/v1/cache/export", "Export the cached prompts of the request's key as a file.", Shape(), 400),
        kind="chat",
    ),
    get_operation(
        *("importCache", IMPORT_PATH),
        "Import cached prompts of a server with the same model and archive key; for the administrator's key.",
        "ingot_api.cache:ImportedBody",
        *(400, 408, 413, 415),
        method="POST",
        takes="file",
        kind="chat",
    ),
    body_operation(
        *("loadLora", "/v1/load_lora_adapter"),
        "Load a LoRA adapter from a folder of the server; for the administrator's key.",
        Shape("lora_adapters:LoraChanged", "lora_adapters:LOAD_LORA_BODY"),
        errors=(*BODY_ERRORS, 403),
    ),
    body_operation(
        *("unloadLora", "/v1/unload_lora_adapter", "Unload a LoRA adapter; for the administrator's key."),
        Shape("lora_adapters:LoraChanged", "lora_adapters:UNLOAD_LORA_BODY"),
        errors=(*BODY_ERRORS, 403),
    ),
    probe_operation("health", "/health", "Whether requests are accepted."),
    probe_operation("live", "/health/live", "Whether the engine is alive."),
    probe_operation("ready", "/health/ready", "Whether requests are accepted."),
    get_operation(
        *("metrics", "/metrics", "Metrics in Prometheus' format; for the administrator's key."),
        Shape(media="text/plain"),
    ),
    get_operation(
        *("loads", "/v1/loads", "The load of the server, for routers; for the administrator's key."),
        "ingot_api.metrics:LoadsBody",
    ),
    get_operation("version", "/version", "The version of the server.", "ingot_api.health:VersionBody"),
)

_AT: Final = {operation.path: operation for operation in reversed(OPERATIONS)}


def operation_at(path: str) -> Operation | None:
    """The first operation of a path without parameters."""
    return _AT.get(path)


MATCHED_HEADER: Final = "ingot-cache-matched-tokens"
REASON_HEADER: Final = "ingot-cache-reason"
TIMING_HEADERS: Final = ("ingot-queue-s", "ingot-prefill-s", "ingot-decode-s")
RECEIPT_HEADERS: Final = (MATCHED_HEADER, REASON_HEADER, *TIMING_HEADERS)

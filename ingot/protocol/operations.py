"""The table of operations: what a client can ask for, and where; and the headers that answers carry.

Light to import: a server is ready before it has imported `openapi`, which says what bodies and answers look like.
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
"""Who answers: one of the endpoints that all protocols share, or one of its own."""
FramingName = Literal["events", "chunks", "named events", "lines"]


@cache
def load(reference: Reference) -> Any:
    """What a row names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"ingot.protocol.{module}"), name)


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol: where its addresses lie, and what its errors and streams look like."""

    under: str
    error: Reference  # whose `of` makes an error's body
    framing: FramingName = "events"
    fault: Reference | None = None  # whose `of` makes the event of a stream that failed before it began; None: `error`
    alive: Reference | None = None  # the event that fills a silence; None: what the framing has for that
    id_header: str = ""  # where its clients look for a request's id


OPENAI: Final = Wire("", "errors:ErrorBody")
"""The words of all that is under no other protocol's addresses, our own included."""
ANTHROPIC: Final = Wire(
    *("/v1/messages", "errors:AnthropicError", "named events"),
    alive="anthropic.answers:MessagePing",
    id_header="request-id",
)
RESPONSES: Final = Wire("/v1/responses", "errors:ErrorBody", "named events", "errors:StreamFault")
OLLAMA: Final = Wire("/api", "errors:OllamaError", "lines")
WIRES: Final = (ANTHROPIC, RESPONSES, OLLAMA, OPENAI)


def wire_at(path: str) -> Wire:
    """The protocol that an address belongs to, whether or not anything is there."""
    return next(wire for wire in WIRES if path == wire.under or path.startswith(f"{wire.under}/") or not wire.under)


@dataclass(frozen=True, slots=True)
class Shape:
    """What an operation is given and answers."""

    answer: Reference | None = None  # None: a file, or text of another `media` type
    body: Reference | None = None  # JSON, or a form with a file
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: Reference | None = None  # of the answer where it is streamed
    events: Reference | None = None  # of the answer where it is streamed as named events
    query: Reference | None = None  # what may follow the path
    texts: tuple[str, ...] | Reference = ()  # media types that the answer may have instead; or a mapping to them
    media: str = FILE  # of an answer that is no JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing a client can ask for."""

    name: str
    method: str
    path: str
    summary: str
    shape: Shape
    errors: tuple[int, ...] = ()
    takes: Literal["json", "form", "file"] | None = None  # as its body
    public: bool = False  # it needs no key
    kind: str = "chat"  # of the model that answers; `any` one, or the `server` itself
    work: Work = "own"
    reader: Reference | None = None  # makes a decoded body into what the engine is to do, or into the answer
    id_prefix: str = PLAIN_ID  # of the request's id, and so of the answer's
    framing: FramingName = "events"  # of its stream
    begins: Literal["asked", "unless refused"] | None = None  # when its stream may begin before its model is there
    span: str = ""  # what OpenTelemetry's conventions call it, as far as they do

    @property
    def runs(self) -> bool:
        """Whether an engine works on it."""
        return set(ENGINE_ERRORS) <= set(self.errors)

    @property
    def wire(self) -> Wire:
        return wire_at(self.path)


def engine_operation(
    name: str, path: str, summary: str, reader: Reference | None, shape: Shape, work: Work = "generate", **more: Any
) -> Operation:
    """A body that an engine works on."""
    given = {"takes": "json", "span": "chat", "framing": wire_at(path).framing, **more}
    return Operation(name, "POST", path, summary, shape, BODY_ERRORS + ENGINE_ERRORS, work=work, reader=reader, **given)


def body_operation(
    name: str, path: str, summary: str, shape: Shape, reader: Reference | None = None, **more: Any
) -> Operation:
    """A body that takes no engine."""
    given = {"errors": BODY_ERRORS, "work": "own" if reader is None else "read", **more}
    return Operation(name, "POST", path, summary, shape, takes="json", reader=reader, **given)


def get_operation(
    name: str, path: str, summary: str, shape: Shape, *errors: int, method: str = "GET", **more: Any
) -> Operation:
    """No body, and no work to speak of: of the server as a whole, unless it says otherwise."""
    return Operation(name, method, path, summary, shape, errors, **{"kind": "server", **more})


def model_change_operation(name: str, what: str, summary: str) -> Operation:
    """Which models are loaded."""
    return get_operation(
        name, f"/v1/models/{{model}}/{what}", summary, Shape(MODEL_BODY), *LOOKUP_ERRORS, method="POST"
    )


def form_operation(name: str, what: str, summary: str, reader: str) -> Operation:
    """A form with a sound."""
    module = "openai.transcriptions"
    form = f"{module}:{what.removesuffix('s').upper()}_FORM"
    shape = Shape(f"{module}:Transcription", form, chunk=f"{module}:TranscriptChunk", texts=TRANSCRIPTS)
    more = {"takes": "form", "kind": "audio", "span": "transcription"}
    return engine_operation(name, f"/v1/audio/{what}", summary, f"{module}:{reader}", shape, "transcribe", **more)


def ranks(name: str, path: str, reader: Reference) -> Operation:
    shape, summary = Shape("pooling:RerankAnswer", "pooling:RERANK_BODY"), "Documents by how well they answer a query."
    return engine_operation(name, path, summary, reader, shape, "encode", kind="rerank", span="rerank")


def probe_operation(name: str, path: str, summary: str) -> Operation:
    return get_operation(name, path, summary, Shape("ingot_api.health:HealthBody", other_answers=(503,)), public=True)


VECTORS: Final[dict[str, Any]] = {"work": "encode", "kind": "embedding", "span": "embeddings"}
COMPLETION: Final = "openai.completions:Completion"
RESPONSE_BODY: Final = "responses.answers:ResponseBody"
MODEL_BODY: Final = "model_listings:ModelBody"
SOUNDS: Final = "openai.speech:AUDIO_MEDIA_TYPES"

OPERATIONS: Final = (
    # OpenAI's, and of others who use its words
    engine_operation(
        *("createChatCompletion", "/v1/chat/completions", "Answer a conversation.", "openai.chat:read_chat"),
        Shape("openai.chat_answers:ChatCompletion", "openai.chat:CHAT_BODY", chunk="openai.chat_answers:ChatChunk"),
        id_prefix="chatcmpl-",
        begins="asked",
    ),
    engine_operation(
        *("createCompletion", "/v1/completions", "Continue a text.", "openai.completions:read_completion"),
        Shape(COMPLETION, "openai.completions:COMPLETION_BODY", chunk=COMPLETION),
        id_prefix="cmpl-",
        begins="asked",
        span="text_completion",
    ),
    engine_operation(
        *("infill", "/infill", "Fill in what stands between two texts, in llama.cpp's words.", "infill:read_infill"),
        Shape("infill:InfillAnswer", "infill:INFILL_BODY", chunk="infill:InfillAnswer"),
        framing="chunks",
    ),
    # Anthropic's
    engine_operation(
        *("createMessage", "/v1/messages", "Answer a conversation, in Anthropic's words."),
        "anthropic.request:read_messages",
        Shape(
            *("anthropic.answers:MessageBody", "anthropic.request:MESSAGES_BODY"),
            events="anthropic.answers:MESSAGE_EVENTS",
        ),
        id_prefix="msg_",
        begins="asked",
    ),
    body_operation(
        *("countMessageTokens", "/v1/messages/count_tokens", "The tokens that a conversation takes as a prompt."),
        Shape("anthropic.request:MessageTokenCount", "anthropic.request:COUNT_TOKENS_BODY"),
        "anthropic.request:count_message_tokens",
    ),
    # Models that do not generate
    engine_operation(
        *("createEmbedding", "/v1/embeddings", "A vector for each text.", "pooling:read_embeddings"),
        Shape("pooling:EmbeddingList", "pooling:EMBEDDING_BODY"),
        **VECTORS,
    ),
    ranks("rerank", "/v1/rerank", "pooling:read_rerank"),
    ranks("rerankV2", "/v2/rerank", "pooling:read_rerank_v2"),
    # Responses
    engine_operation(
        *("createResponse", "/v1/responses", "Answer a conversation, in items.", None),
        Shape(RESPONSE_BODY, "responses.request:RESPONSES_BODY", events="responses.answers:ResponseEvent"),
        work="own",
        id_prefix="resp_",
        begins="asked",
    ),
    body_operation(
        *("countResponseTokens", "/v1/responses/input_tokens", "The tokens that a response would take as a prompt."),
        Shape("responses.answers:ResponseTokens", "responses.request:RESPONSES_BODY"),
        errors=(*BODY_ERRORS, 503),
    ),
    get_operation(
        *("retrieveResponse", RESPONSE_PATH, "A response that is stored or under way."),
        Shape(RESPONSE_BODY, query="responses.request:RESPONSE_QUERY"),
        *LOOKUP_ERRORS,
    ),
    get_operation(
        *("deleteResponse", RESPONSE_PATH, "Forget a response.", Shape("responses.answers:DeletedResponse"), 404, 503),
        method="DELETE",
    ),
    get_operation(
        *("cancelResponse", f"{RESPONSE_PATH}/cancel", "Stop a response that is under way.", Shape(RESPONSE_BODY)),
        *LOOKUP_ERRORS,
        method="POST",
    ),
    get_operation(
        *("listInputItems", f"{RESPONSE_PATH}/input_items", "What a response answered."),
        Shape("responses.answers:InputItemList", query="responses.request:ITEMS_QUERY"),
        *LOOKUP_ERRORS,
    ),
    # Speech
    form_operation("createTranscription", "transcriptions", "Write down what is spoken.", "read_transcription"),
    form_operation("createTranslation", "translations", "Write it down in English.", "read_translation"),
    engine_operation(
        *("createSpeech", "/v1/audio/speech", "Speak a text.", "openai.speech:read_speech"),
        Shape(None, "openai.speech:SPEECH_BODY", chunk="openai.speech:SpeechChunk", texts=SOUNDS),
        work="speak",
        kind="speech",
        span="speech",
    ),
    get_operation(
        "listVoices", "/v1/audio/voices", "Whose voices there are.", Shape("openai.speech:VoiceList"), kind="speech"
    ),
    # Models
    get_operation("listModels", "/v1/models", "What is served.", Shape("model_listings:ModelList")),
    get_operation("retrieveModel", "/v1/models/{model}", "The model served under a name.", Shape(MODEL_BODY), 404),
    model_change_operation(
        "loadModel", "load", "Load a model, and wait until it is there; for the administrator's key."
    ),
    model_change_operation(
        "unloadModel", "unload", "Let a model finish what it has, and unload it; for the administrator's key."
    ),
    model_change_operation(
        "swapModel", "swap", "Load a model in place of all that are not pinned; for the administrator's key."
    ),
    body_operation(
        *("tokenize", "/v1/tokenize", "The tokens of a text or of a conversation."),
        Shape("ingot_api.tokenize:TokenizeAnswer", "ingot_api.tokenize:TOKENIZE_BODY"),
        "ingot_api.tokenize:answer_tokenize",
    ),
    body_operation(
        *("detokenize", "/v1/detokenize", "The text of tokens."),
        Shape("ingot_api.tokenize:DetokenizeAnswer", "ingot_api.tokenize:DETOKENIZE_BODY"),
        "ingot_api.tokenize:answer_detokenize",
    ),
    # Ollama's
    engine_operation(
        *("ollamaChat", "/api/chat", "Answer a conversation, in Ollama's words.", "ollama.request:read_ollama_chat"),
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
            "Answer a prompt, in Ollama's words.",
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
        *("ollamaEmbed", "/api/embed", "Vectors of texts, in Ollama's words.", "pooling:read_ollama_embed"),
        Shape("pooling:OllamaEmbedded", "pooling:OLLAMA_EMBED_BODY"),
        **VECTORS,
    ),
    engine_operation(
        *("ollamaEmbeddings", "/api/embeddings", "The vector of a text, as Ollama once asked for it."),
        "pooling:read_ollama_old_embedding",
        Shape("pooling:OllamaOldEmbedding", "pooling:OLLAMA_OLD_EMBEDDING_BODY"),
        **VECTORS,
    ),
    body_operation(
        *("ollamaShow", "/api/show", "What a model is."),
        Shape("model_listings:OllamaShown", "model_listings:OLLAMA_SHOW_BODY"),
        "model_listings:show_ollama_model",
        kind="any",
    ),
    get_operation(
        "ollamaTags", "/api/tags", "What is served, for Ollama's clients.", Shape("model_listings:OllamaTags")
    ),
    get_operation(
        "ollamaRunning", "/api/ps", "What is loaded, for Ollama's clients.", Shape("model_listings:OllamaRunning")
    ),
    get_operation("ollamaVersion", "/api/version", "Whose protocol this is.", Shape("model_listings:OllamaVersion")),
    # Our own
    get_operation(
        "listRequests",
        "/v1/requests",
        "What runs now, and how far it is.",
        Shape("ingot_api.requests:RunningRequestList"),
    ),
    get_operation(
        *("retrieveRequest", "/v1/requests/{id}"),
        "How far a running request is, or the receipt of one that ended lately.",
        Shape("ingot_api.requests:RequestStatusBody"),
        404,
    ),
    get_operation(
        *(
            "cancelRequest",
            "/v1/requests/{id}",
            "Stop a running request.",
            Shape("ingot_api.requests:CancelledRequestBody"),
            404,
        ),
        method="DELETE",
    ),
    get_operation(
        *("showLive", "/v1/live", "What the engine does now, and what it did lately, for the page."),
        Shape("ingot_api.requests:LiveBody"),
    ),
    get_operation(
        *("showCacheTree", "/v1/cache/tree", "How what is kept branches, and what it was good for."),
        Shape("ingot_api.cache:CacheTreeBody"),
    ),
    get_operation(
        "showCache", "/v1/cache", "What is kept of earlier prompts.", Shape("ingot_api.cache:CacheBody"), kind="chat"
    ),
    get_operation(
        *("clearCache", "/v1/cache", "Forget all that is kept of the asking key's prompts."),
        Shape("ingot_api.cache:ClearedBody"),
        method="DELETE",
        kind="chat",
    ),
    body_operation(
        *("explainCache", "/v1/cache/explain", "What a request would take over if it came now, and why no more."),
        Shape("ingot_api.cache:ExplainedBody", "ingot_api.cache:EXPLAIN_BODY"),
    ),
    get_operation(
        *("exportCache", "/v1/cache/export", "What is kept of the asking key's prompts, as a file.", Shape(), 400),
        kind="chat",
    ),
    get_operation(
        *("importCache", IMPORT_PATH),
        "Keep what a server of the same model and archive key kept; for the administrator's key.",
        Shape("ingot_api.cache:ImportedBody"),
        *(400, 408, 413, 415),
        method="POST",
        takes="file",
        kind="chat",
    ),
    body_operation(
        *("loadLora", "/v1/load_lora_adapter"),
        "Serve an adapter from a folder of the server's machine; for the administrator's key.",
        Shape("lora_adapters:LoraChanged", "lora_adapters:LOAD_LORA_BODY"),
        errors=(*BODY_ERRORS, 403),
    ),
    body_operation(
        *("unloadLora", "/v1/unload_lora_adapter", "Serve an adapter no longer; for the administrator's key."),
        Shape("lora_adapters:LoraChanged", "lora_adapters:UNLOAD_LORA_BODY"),
        errors=(*BODY_ERRORS, 403),
    ),
    probe_operation("health", "/health", "Whether a request would be taken."),
    probe_operation("live", "/health/live", "Whether the engine is alive."),
    probe_operation("ready", "/health/ready", "Whether a request would be taken."),
    get_operation(
        *("metrics", "/metrics", "What the server did and does, for Prometheus; for the administrator's key."),
        Shape(media="text/plain"),
    ),
    get_operation(
        *("loads", "/v1/loads", "How busy the server is, for routers; for the administrator's key."),
        Shape("ingot_api.metrics:LoadsBody"),
    ),
    get_operation("version", "/version", "What this server is.", Shape("ingot_api.health:VersionBody")),
)

_AT: Final = {operation.path: operation for operation in reversed(OPERATIONS)}


def operation_at(path: str) -> Operation | None:
    """The first operation of an address that names nothing further."""
    return _AT.get(path)


MATCHED_HEADER: Final = "ingot-cache-matched-tokens"
REASON_HEADER: Final = "ingot-cache-reason"
TIMING_HEADERS: Final = ("ingot-queue-s", "ingot-prefill-s", "ingot-decode-s")
RECEIPT_HEADERS: Final = (MATCHED_HEADER, REASON_HEADER, *TIMING_HEADERS)

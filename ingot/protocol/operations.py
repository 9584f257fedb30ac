"""The table of operations: what a client can ask for, and where; and the headers that answers carry.

Light to import: a server is ready before it has imported `openapi`, which says what bodies and answers look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BODY_ERRORS: Final = (400, 404, 408, 413, 415)
ENGINE_ERRORS: Final = (429, 499, 503, 504)
LOOKUP_ERRORS: Final = (400, 404, 503)
RESPONSE_PATH: Final = "/v1/responses/{response_id}"
IMPORT_PATH: Final = "/v1/cache/import"


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing a client can ask for. `public` ones need no key."""

    name: str
    method: str
    path: str
    summary: str
    errors: tuple[int, ...] = ()
    takes: Literal["json", "form", "file"] | None = None  # as its body
    public: bool = False

    @property
    def runs(self) -> bool:
        """Whether an engine works on it."""
        return set(ENGINE_ERRORS) <= set(self.errors)


def engine_operation(name: str, path: str, summary: str) -> Operation:
    """A body that an engine works on."""
    return Operation(name, "POST", path, summary, BODY_ERRORS + ENGINE_ERRORS, "json")


def body_operation(name: str, path: str, summary: str, *errors: int) -> Operation:
    """A body that takes no engine."""
    return Operation(name, "POST", path, summary, BODY_ERRORS + errors, "json")


def form_operation(name: str, path: str, summary: str) -> Operation:
    """A form with a sound."""
    return Operation(name, "POST", path, summary, BODY_ERRORS + ENGINE_ERRORS, "form")


def get_operation(name: str, path: str, summary: str, *errors: int) -> Operation:
    return Operation(name, "GET", path, summary, errors)


def probe_operation(name: str, path: str, summary: str) -> Operation:
    return Operation(name, "GET", path, summary, public=True)


def model_change_operation(name: str, what: str, summary: str) -> Operation:
    """Which models are loaded."""
    return Operation(name, "POST", f"/v1/models/{{model}}/{what}", summary, (400, 404, 503))


OPERATIONS: Final = (
    engine_operation("createChatCompletion", "/v1/chat/completions", "Answer a conversation."),
    engine_operation("createCompletion", "/v1/completions", "Continue a text."),
    engine_operation("infill", "/infill", "Fill in what stands between two texts, in llama.cpp's words."),
    engine_operation("createMessage", "/v1/messages", "Answer a conversation, in Anthropic's words."),
    body_operation(
        "countMessageTokens", "/v1/messages/count_tokens", "The tokens that a conversation takes as a prompt."
    ),
    engine_operation("createEmbedding", "/v1/embeddings", "A vector for each text."),
    engine_operation("rerank", "/v1/rerank", "Documents by how well they answer a query."),
    engine_operation("rerankV2", "/v2/rerank", "Documents by how well they answer a query."),
    engine_operation("createResponse", "/v1/responses", "Answer a conversation, in items."),
    body_operation(
        "countResponseTokens",
        "/v1/responses/input_tokens",
        "The tokens that a response would take as a prompt.",
        503,
    ),
    get_operation("retrieveResponse", RESPONSE_PATH, "A response that is stored or under way.", *LOOKUP_ERRORS),
    Operation("deleteResponse", "DELETE", RESPONSE_PATH, "Forget a response.", (404, 503)),
    Operation("cancelResponse", "POST", f"{RESPONSE_PATH}/cancel", "Stop a response that is under way.", LOOKUP_ERRORS),
    get_operation("listInputItems", f"{RESPONSE_PATH}/input_items", "What a response answered.", *LOOKUP_ERRORS),
    form_operation("createTranscription", "/v1/audio/transcriptions", "Write down what is spoken."),
    form_operation("createTranslation", "/v1/audio/translations", "Write it down in English."),
    engine_operation("createSpeech", "/v1/audio/speech", "Speak a text."),
    get_operation("listVoices", "/v1/audio/voices", "Whose voices there are."),
    get_operation("listModels", "/v1/models", "What is served."),
    get_operation("retrieveModel", "/v1/models/{model}", "The model served under a name.", 404),
    model_change_operation(
        "loadModel", "load", "Load a model, and wait until it is there; for the administrator's key."
    ),
    model_change_operation(
        "unloadModel", "unload", "Let a model finish what it has, and unload it; for the administrator's key."
    ),
    model_change_operation(
        "swapModel", "swap", "Load a model in place of all that are not pinned; for the administrator's key."
    ),
    body_operation("tokenize", "/v1/tokenize", "The tokens of a text or of a conversation."),
    body_operation("detokenize", "/v1/detokenize", "The text of tokens."),
    engine_operation("ollamaChat", "/api/chat", "Answer a conversation, in Ollama's words."),
    engine_operation("ollamaGenerate", "/api/generate", "Answer a prompt, in Ollama's words."),
    engine_operation("ollamaEmbed", "/api/embed", "Vectors of texts, in Ollama's words."),
    engine_operation("ollamaEmbeddings", "/api/embeddings", "The vector of a text, as Ollama once asked for it."),
    body_operation("ollamaShow", "/api/show", "What a model is."),
    get_operation("ollamaTags", "/api/tags", "What is served, for Ollama's clients."),
    get_operation("ollamaRunning", "/api/ps", "What is loaded, for Ollama's clients."),
    get_operation("ollamaVersion", "/api/version", "Whose protocol this is."),
    get_operation("listRequests", "/v1/requests", "What runs now, and how far it is."),
    get_operation(
        "retrieveRequest",
        "/v1/requests/{id}",
        "How far a running request is, or the receipt of one that ended lately.",
        404,
    ),
    Operation("cancelRequest", "DELETE", "/v1/requests/{id}", "Stop a running request.", (404,)),
    get_operation("showLive", "/v1/live", "What the engine does now, and what it did lately, for the page."),
    get_operation("showCacheTree", "/v1/cache/tree", "How what is kept branches, and what it was good for."),
    get_operation("showCache", "/v1/cache", "What is kept of earlier prompts."),
    Operation("clearCache", "DELETE", "/v1/cache", "Forget all that is kept of the asking key's prompts."),
    body_operation(
        "explainCache", "/v1/cache/explain", "What a request would take over if it came now, and why no more."
    ),
    get_operation("exportCache", "/v1/cache/export", "What is kept of the asking key's prompts, as a file.", 400),
    Operation(
        "importCache",
        "POST",
        IMPORT_PATH,
        "Keep what a server of the same model and archive key kept; for the administrator's key.",
        (400, 408, 413, 415),
        "file",
    ),
    body_operation(
        "loadLora",
        "/v1/load_lora_adapter",
        "Serve an adapter from a folder of the server's machine; for the administrator's key.",
        403,
    ),
    body_operation(
        "unloadLora", "/v1/unload_lora_adapter", "Serve an adapter no longer; for the administrator's key.", 403
    ),
    probe_operation("health", "/health", "Whether a request would be taken."),
    probe_operation("live", "/health/live", "Whether the engine is alive."),
    probe_operation("ready", "/health/ready", "Whether a request would be taken."),
    get_operation("metrics", "/metrics", "What the server did and does, for Prometheus; for the administrator's key."),
    get_operation("loads", "/v1/loads", "How busy the server is, for routers; for the administrator's key."),
    get_operation("version", "/version", "What this server is."),
)


MATCHED_HEADER: Final = "ingot-cache-matched-tokens"
REASON_HEADER: Final = "ingot-cache-reason"
TIMING_HEADERS: Final = ("ingot-queue-s", "ingot-prefill-s", "ingot-decode-s")
RECEIPT_HEADERS: Final = (MATCHED_HEADER, REASON_HEADER, *TIMING_HEADERS)

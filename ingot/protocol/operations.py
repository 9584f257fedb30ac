"""The table of operations: what a client can ask for, and where. What their bodies and answers look like is told by
`openapi`, which takes long to import: a server is ready before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

READS_BODY: Final = (400, 404, 408, 413, 415)
RUNS: Final = (429, 499, 503, 504)
LOOKS_UP: Final = (400, 404, 503)
RESPONSE: Final = "/v1/responses/{response_id}"
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
        return set(RUNS) <= set(self.errors)


def runs(name: str, path: str, summary: str) -> Operation:
    """A body that an engine works on."""
    return Operation(name, "POST", path, summary, READS_BODY + RUNS, "json")


def reads(name: str, path: str, summary: str, *errors: int) -> Operation:
    """A body that takes no engine."""
    return Operation(name, "POST", path, summary, READS_BODY + errors, "json")


def hears(name: str, path: str, summary: str) -> Operation:
    """A form with a sound."""
    return Operation(name, "POST", path, summary, READS_BODY + RUNS, "form")


def tells(name: str, path: str, summary: str, *errors: int) -> Operation:
    return Operation(name, "GET", path, summary, errors)


def probes(name: str, path: str, summary: str) -> Operation:
    return Operation(name, "GET", path, summary, public=True)


def changes(name: str, what: str, summary: str) -> Operation:
    """Which models are loaded."""
    return Operation(name, "POST", f"/v1/models/{{model}}/{what}", summary, (400, 404, 503))


OPERATIONS: Final = (
    runs("createChatCompletion", "/v1/chat/completions", "Answer a conversation."),
    runs("createCompletion", "/v1/completions", "Continue a text."),
    runs("infill", "/infill", "Fill in what stands between two texts, in llama.cpp's words."),
    runs("createMessage", "/v1/messages", "Answer a conversation, in Anthropic's words."),
    reads("countMessageTokens", "/v1/messages/count_tokens", "The tokens that a conversation takes as a prompt."),
    runs("createEmbedding", "/v1/embeddings", "A vector for each text."),
    runs("rerank", "/v1/rerank", "Documents by how well they answer a query."),
    runs("rerankV2", "/v2/rerank", "Documents by how well they answer a query."),
    runs("createResponse", "/v1/responses", "Answer a conversation, in items."),
    reads(
        "countResponseTokens",
        "/v1/responses/input_tokens",
        "The tokens that a response would take as a prompt.",
        503,
    ),
    tells("retrieveResponse", RESPONSE, "A response that is stored or under way.", *LOOKS_UP),
    Operation("deleteResponse", "DELETE", RESPONSE, "Forget a response.", (404, 503)),
    Operation("cancelResponse", "POST", f"{RESPONSE}/cancel", "Stop a response that is under way.", LOOKS_UP),
    tells("listInputItems", f"{RESPONSE}/input_items", "What a response answered.", *LOOKS_UP),
    hears("createTranscription", "/v1/audio/transcriptions", "Write down what is spoken."),
    hears("createTranslation", "/v1/audio/translations", "Write it down in English."),
    runs("createSpeech", "/v1/audio/speech", "Speak a text."),
    tells("listVoices", "/v1/audio/voices", "Whose voices there are."),
    tells("listModels", "/v1/models", "What is served."),
    tells("retrieveModel", "/v1/models/{model}", "The model served under a name.", 404),
    changes("loadModel", "load", "Load a model, and wait until it is there; for the administrator's key."),
    changes("unloadModel", "unload", "Let a model finish what it has, and unload it; for the administrator's key."),
    changes("swapModel", "swap", "Load a model in place of all that are not pinned; for the administrator's key."),
    reads("tokenize", "/v1/tokenize", "The tokens of a text or of a conversation."),
    reads("detokenize", "/v1/detokenize", "The text of tokens."),
    runs("ollamaChat", "/api/chat", "Answer a conversation, in Ollama's words."),
    runs("ollamaGenerate", "/api/generate", "Answer a prompt, in Ollama's words."),
    runs("ollamaEmbed", "/api/embed", "Vectors of texts, in Ollama's words."),
    runs("ollamaEmbeddings", "/api/embeddings", "The vector of a text, as Ollama once asked for it."),
    reads("ollamaShow", "/api/show", "What a model is."),
    tells("ollamaTags", "/api/tags", "What is served, for Ollama's clients."),
    tells("ollamaRunning", "/api/ps", "What is loaded, for Ollama's clients."),
    tells("ollamaVersion", "/api/version", "Whose protocol this is."),
    tells("listRequests", "/v1/requests", "What runs now, and how far it is."),
    tells(
        "retrieveRequest",
        "/v1/requests/{id}",
        "How far a running request is, or the receipt of one that ended lately.",
        404,
    ),
    Operation("cancelRequest", "DELETE", "/v1/requests/{id}", "Stop a running request.", (404,)),
    tells("showLive", "/v1/live", "What the engine does now, and what it did lately, for the page."),
    tells("showCacheTree", "/v1/cache/tree", "How what is kept branches, and what it was good for."),
    tells("showCache", "/v1/cache", "What is kept of earlier prompts."),
    Operation("clearCache", "DELETE", "/v1/cache", "Forget all that is kept of the asking key's prompts."),
    reads("explainCache", "/v1/cache/explain", "What a request would take over if it came now, and why no more."),
    tells("exportCache", "/v1/cache/export", "What is kept of the asking key's prompts, as a file.", 400),
    Operation(
        "importCache",
        "POST",
        IMPORT_PATH,
        "Keep what a server of the same model and archive key kept; for the administrator's key.",
        (400, 408, 413, 415),
        "file",
    ),
    reads(
        "loadLora",
        "/v1/load_lora_adapter",
        "Serve an adapter from a folder of the server's machine; for the administrator's key.",
        403,
    ),
    reads("unloadLora", "/v1/unload_lora_adapter", "Serve an adapter no longer; for the administrator's key.", 403),
    probes("health", "/health", "Whether a request would be taken."),
    probes("live", "/health/live", "Whether the engine is alive."),
    probes("ready", "/health/ready", "Whether a request would be taken."),
    tells("metrics", "/metrics", "What the server did and does, for Prometheus; for the administrator's key."),
    tells("loads", "/v1/loads", "How busy the server is, for routers; for the administrator's key."),
    tells("version", "/version", "What this server is."),
)

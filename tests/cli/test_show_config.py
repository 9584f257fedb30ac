from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path

from ingot.cli.show import format_config
from ingot.config import SETTINGS, load_config
from ingot.models.files.model_store import store_model
from ingot.models.files.progress import no_progress

FLAGS = {"allowed_hosts": "a,b", "models_dir": "/m", "memory": "60%", "api_key": "hunter22", "keepalive_s": "2.5"}
FLAGS |= {"override_generation_config": '{"top_k": 20}', "default_chat_template_kwargs": '{"mood": "glad", "on": true}'}


def test_what_is_shown_is_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    config = load_config(FLAGS, environ)
    path = tmp_path / "again.toml"
    path.write_text(format_config(config))
    again = load_config({}, environ, path).settings
    assert asdict(again) == asdict(config.settings) | {"api_key": None}


def test_every_setting_is_shown_with_its_meaning_and_origin(tmp_path: Path) -> None:
    text = format_config(load_config({}, {"XDG_CONFIG_HOME": str(tmp_path)}))
    assert all(f"# {known.help}\n# from: default\n" in text for known in SETTINGS.values())
    assert tomllib.loads(text)["port"] == 8000


def test_secrets_are_masked(tmp_path: Path) -> None:
    assert "hunter22" not in format_config(load_config(FLAGS, {"XDG_CONFIG_HOME": str(tmp_path)}))


def test_what_a_model_s_makers_recommend_is_shown_with_what_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 40}')
    flags = {"model": str(tmp_path), "override_generation_config": '{"top_k": 20}'}
    line = '# default sampling parameters: {"temperature" = 0.6, "top_k" = 20}'
    assert line in format_config(load_config(flags, {"XDG_CONFIG_HOME": str(tmp_path)}))
    none = format_config(
        load_config({"model": str(tmp_path), "generation_config": "none"}, {"XDG_CONFIG_HOME": str(tmp_path)})
    )
    assert "# default sampling parameters: none" in none


def test_a_converted_model_is_looked_at_by_its_name_without_its_hash(tmp_path: Path) -> None:
    def fill(target: Path) -> None:
        (target / "generation_config.json").write_text('{"temperature": 0.6}')

    store_model(
        tmp_path / "tiny-0123456789ab", {"source": "gguf:tiny.gguf", "sha256": "0123456789abcdef"}, fill, no_progress
    )
    shown = format_config(
        load_config({"model": "tiny", "models_dir": str(tmp_path)}, {"XDG_CONFIG_HOME": str(tmp_path)})
    )
    assert '# default sampling parameters: {"temperature" = 0.6}' in shown

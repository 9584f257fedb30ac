"""Whether the definitions in docs/service.md and deploy/ are sound, and give `ingot serve` flags that it has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

from ingot.config import load_config
from tests.docs.pages import FLAG, ROOT, fences, flags_of

PAGE = (ROOT / "docs" / "service.md").read_text()


def check(words: list[str]) -> None:
    assert Path(words[0]).name == "ingot" and words[1] == "serve", words
    assert {word for word in words if FLAG.fullmatch(word)} <= flags_of(("serve",))


def test_the_settings_file_is_read_as_it_stands(tmp_path: Path) -> None:
    (text,) = fences(PAGE, "toml")
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-yours\n")
    file = tmp_path / "config.toml"
    file.write_text(text.replace("/etc/ingot/keys", str(keys)))
    settings = load_config({}, {"INGOT_CONFIG": str(file)}).settings
    assert (settings.host, settings.allowed_hosts) == ("0.0.0.0", ("models.example.org",))
    assert settings.api_key_file == keys


def test_the_systemd_unit_starts_the_server() -> None:
    (text,) = fences(PAGE, "ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    check(shlex.split(unit["Service"]["ExecStart"]))
    folder = unit["Service"]["StateDirectory"]
    assert unit["Service"]["Environment"] == f"HOME=/var/lib/{folder}"


def test_the_container_starts_the_server() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    check(json.loads(entry))

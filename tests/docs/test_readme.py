"""Whether the README fits on a screen, and says the same in every language: its code, its links, its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, code

ENGLISH = ROOT / "README.md"
TRANSLATIONS = {language: ROOT / "docs" / f"README.{language}.md" for language in ("es", "fr", "zh")}
SCREEN = 50  # lines

translations = pytest.mark.parametrize("page", TRANSLATIONS.values(), ids=TRANSLATIONS.keys())


def links(page: Path) -> list[str]:
    """Where a page leads, other languages' versions aside."""
    found = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "README" not in link]
    return [link if "://" in link else str((page.parent / link).resolve()) for link in found]


def languages(page: Path) -> set[Path]:
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)]*README[^)]*)\)", page.read_text())}


@pytest.mark.parametrize("page", [ENGLISH, *TRANSLATIONS.values()], ids=lambda page: page.name)
def test_a_readme_fits_on_a_screen_and_leads_to_all_others(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= SCREEN
    assert languages(page) == {ENGLISH, *TRANSLATIONS.values()} - {page}


@translations
def test_a_translation_has_the_code_of_the_original(page: Path) -> None:
    assert code(page.read_text()) == code(ENGLISH.read_text())


@translations
def test_a_translation_leads_where_the_original_does(page: Path) -> None:
    assert links(page) == links(ENGLISH)

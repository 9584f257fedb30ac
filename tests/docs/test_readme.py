"""Whether the README fits on a screen, and says the same in every language: its code, its links, its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import GUIDES, LANGUAGES, ROOT, blocks, code

ENGLISH = ROOT / "README.md"
TRANSLATIONS = {language: ROOT / "docs" / f"README.{language}.md" for language in LANGUAGES}
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


def in_language(link: str, language: str) -> str:
    """A link of an English page as the page in that language has it."""
    path = Path(link)
    guide = path.parent == ROOT / "docs" and path.stem in GUIDES
    return str(path.parent / language / path.name) if guide else link


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_leads_where_the_original_does(language: str) -> None:
    assert links(TRANSLATIONS[language]) == [in_language(link, language) for link in links(ENGLISH)]


def headings(page: Path) -> list[int]:
    """The level of each heading, in order. A line of code is none."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) \S", text, re.MULTILINE)]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_has_the_headings_the_commands_and_the_links_of_the_english_one(name: str, language: str) -> None:
    original, page = ROOT / "docs" / f"{name}.md", ROOT / "docs" / language / f"{name}.md"
    assert headings(page) == headings(original)
    assert blocks(page.read_text()) == blocks(original.read_text())
    assert sorted(code(page.read_text())) == sorted(code(original.read_text()))
    wanted = [in_language(link.partition("#")[0], language) for link in links(original)]
    assert sorted(link.partition("#")[0] for link in links(page)) == sorted(wanted)
    assert all("://" in link or Path(link.partition("#")[0]).exists() for link in links(page))
    assert f"({language}/{name}.md)" in TRANSLATIONS[language].read_text()

"""The documents and the program say the same: links lead somewhere, options and commands exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ecoserve.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def prose(path: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_the_readme_names_the_options_of_up() -> None:
    table = prose(ROOT / "README.md").partition("## Options")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
    told = {option for row in rows for option in re.findall(r"--[\w-]+", row)}
    up = get_command(app).commands["up"]  # type: ignore[attr-defined]
    there = {option for param in up.params for option in param.opts if option.startswith("--")}
    assert told == there - {"--help", "--debug-mode"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command line of ours in a block of code, without ``ecoserve`` itself."""
    for path, name in zip(DOCUMENTS, NAMES, strict=True):
        for block in re.findall(r"^```\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if re.match(r"(\.venv/bin/)?ecoserve ", line):
                    yield name, shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize(("document", "words"), list(commands()))
def test_commands_are_understood(document: str, words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output

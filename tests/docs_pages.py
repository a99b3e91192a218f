"""The project's documents as tests read them: pages, their blocks of code, and the commands in those."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvferry.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"""^(?P<indent> *)```(?P<language>[\w-]*)(?: title="(?P<title>[^"\n]*)")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$""",
    re.MULTILINE | re.DOTALL,
)
BREAKS = ";&|()\n"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code: its page, the line at which it begins, its language, and its text without indentation.

    One with a title is an excerpt: the title is the file, relative to the repository."""

    page: Path
    line: int
    language: str
    text: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every document for people, in a fixed order."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *DOCS.rglob("*.md")])


def blocks(language: str = "") -> list[Block]:
    """The blocks of all pages, or those of one language."""
    found = [block for page in pages() for block in _blocks_of(page)]
    return [block for block in found if language in ("", block.language)]


def _blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, each.start()) + 1,
            each["language"],
            textwrap.dedent(each["text"]),
            each["title"] or "",
        )
        for each in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(shell: str) -> list[list[str]]:
    """The commands of a shell script that is simple enough for a document, as words; variables stay as they are."""
    without_comments = re.sub(r"(^|\s)# .*$", "", shell.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(without_comments, posix=True, punctuation_chars=BREAKS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set(BREAKS):
            found.append([])
        elif found[-1] or not re.match(r"\w+=", token):
            found[-1].append(token)
    return [command for command in found if command]


def calls_of(program: str) -> list[tuple[str, list[str]]]:
    """(place, words after the program) wherever a shell block calls it."""
    every = [(str(block), words) for block in blocks("bash") for words in commands(block.text)]
    return [(place, words[1:]) for place, words in every if words[0] == program]


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    """The command of ours that the words after `kvferry` call, and what is left of them."""
    command, rest = get_command(app), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: Any) -> set[str]:
    """The options of a command as they are typed."""
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def all_options(command: Any = None) -> set[str]:
    """The options of all commands of ours."""
    command = get_command(app) if command is None else command
    return options_of(command).union(*map(all_options, getattr(command, "commands", {}).values()))

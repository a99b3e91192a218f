"""What people read is plain English: phrases that were found odd, and what is of their kind, do not come back."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kvferry"
ODD = re.compile(
    r"\bcalled so\b|\bso fast, or so slow\b|\bof nobody\b|\bis no (?:json|url|object|number)\b|\bno meaning\b"
    r"|\bin one way only\b|\bknows no more\b|\binstead: |\bsilent for three\b|\bwants requests\b|\bdefect of ours\b"
    r"|\bforbid less\b|\bknows nothing of\b|\bmeasured when met\b|\bhold an answer to\b|\bpeers let go\b"
    r"|\bcannot travel\b|\bhave no place\b|\bhas no place\b|\bwithout a word\b|\bknown already\b|\bnobody is told\b",
    re.IGNORECASE,
)


def texts(path: Path) -> list[str]:
    """The string constants of a file, parts of f-strings among them, without its docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in constants if id(node) not in docs]


def test_no_odd_phrase_is_shown_to_people():
    files = [path for path in sorted(SOURCE.rglob("*.py")) if "testing" not in path.parts]
    assert len(files) > 100
    assert [(path.name, text) for path in files for text in texts(path) if ODD.search(text)] == []


def test_an_odd_phrase_would_be_found(tmp_path):
    path = tmp_path / "example.py"
    path.write_text('"""Of nobody."""\nraise ValueError(f"{name}: a message of nobody")\n')
    assert [text for text in texts(path) if ODD.search(text)] == [": a message of nobody"]

"""Records `kvferry up` for the README, as a picture of text: `python tests/docs_recording.py`.

Needs the extra `demo`.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "up.svg"
MODEL = "gemma-3-270m"
PROMPT = "Once upon a time, a ferryman"
COMMAND = ("up", "--model", MODEL, "--once", PROMPT)
WIDTH = 88


def record() -> None:
    """What a terminal shows, in which order: messages and answer come over two pipes that are one here."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", *COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": str(WIDTH)},
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ make up ARGS='--model {MODEL} --once \"{PROMPT}\"'", style="bold"))
    console.print(Text(done.stdout.rstrip()))
    PICTURE.write_text(console.export_svg(title="kvferry up", theme=DIMMED_MONOKAI))


if __name__ == "__main__":
    record()

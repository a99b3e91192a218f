"""A command may open as many files as the system allows it, not as few as it allows by default."""

import resource
import subprocess
import sys

import pytest

COMMAND = """
import resource, sys
from kvferry.cli import main
main.app = lambda: print(*resource.getrlimit(resource.RLIMIT_NOFILE))
main.main()
"""


def limits(code, soft, hard):
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 1024, 1024), (1024, 1024, 1024), (256, 1 << 17, 1 << 16), ((1 << 16) + 1, 1 << 17, (1 << 16) + 1)],
)
def test_the_soft_limit_becomes_the_hard_one_as_far_as_that_is_of_use(soft, hard, expected):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"needs a hard limit of {hard} files")
    code = "import resource, kvferry.system as s; s.allow_many_descriptors(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert limits(code, soft, hard) == (expected, hard)


def test_every_command_begins_with_that():
    assert limits(COMMAND, 256, 1024) == (1024, 1024)

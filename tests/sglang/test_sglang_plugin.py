"""Whether SGLang would use our backend, asked of the real one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from sglang_servers import environment

CHECK = """
import os
from sglang.srt import plugins
from kvferry.connectors.sglang.plugin import check_loaded
from kvferry.errors import ConfigurationError

os.environ["SGLANG_PLUGINS"] = "another"
try:
    check_loaded()
except ConfigurationError as error:
    print(error)
del os.environ["SGLANG_PLUGINS"]
# SGLang loads plug-ins once per process.
plugins._plugins_loaded = False
check_loaded()
print("it is used")
"""


def test_what_sglang_would_do_is_known_before_it_starts():
    command, variables = [sys.executable, "-c", CHECK], {**os.environ, **environment()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert "does not load kvferry's plug-in; found: SGLANG_PLUGINS=another" in done.stdout, done.stderr
    assert "it is used" in done.stdout, done.stderr

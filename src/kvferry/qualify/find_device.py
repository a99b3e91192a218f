"""`python -m kvferry.qualify.find_device` prints the kind of device that the libraries here reach, `cpu` for none.

What is on the bus says less: a processor's own graphics, or a card that the container was not given.
"""

from __future__ import annotations

import sys

from kvferry.qualify.expected import GPUS
from kvferry.qualify.torch_device import number_of
from kvferry.transport.machine.hardware import accelerators
from kvferry.transport.memory_kind import HOST


def find_device() -> str:
    """A GPU that torch reaches, else a TPU on the bus, which only JAX could tell, else `cpu`."""
    others = ("tpu",) if any(each.kind == "tpu" for each in accelerators()) else ()
    return next((kind for kind in GPUS if number_of(kind)), next(iter(others), HOST))


if __name__ == "__main__":
    sys.stdout.write(f"{find_device()}\n")

"""SGLang's kernels: on CPUs without AMX none is called."""

from names_only import stand_in

__version__ = "0.4.10"
stand_in(__name__)

"""torchvision, for models that see: none is served here."""

from names_only import stand_in

__version__ = "0.0.0"
stand_in(__name__)

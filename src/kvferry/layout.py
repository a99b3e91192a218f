"""Where the elements of a cache lie: records for any cache, and helpers that make them for the usual ones.

`describe(attention(…), EngineShape(…), address)` is a whole engine. Where memory looks different, a `Layout` is made by
hand: states with named axes, cache groups with blocks, and per state a `Placement` with an offset and strides. A layout
is checked where it is made; against the other engine's, `kvferry.plan.routing.compatibility` compares it.
"""

from kvferry.plan.description.describe import FORMATS, EngineShape, describe
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State, contents
from kvferry.plan.description.model import CacheModel, Kept, LayerCache, attention, latent
from kvferry.plan.description.span import Span, shares
from kvferry.plan.description.tokens import UNSHARED, TokenRange, TokenShare

__all__ = [
    "FORMATS",
    "UNSHARED",
    "Axis",
    "CacheGroup",
    "CacheModel",
    "EngineShape",
    "Kept",
    "LayerCache",
    "Layout",
    "Placement",
    "Region",
    "Span",
    "State",
    "TokenRange",
    "TokenShare",
    "attention",
    "contents",
    "describe",
    "latent",
    "shares",
]

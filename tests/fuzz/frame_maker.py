"""Frames that no peer of ours would send, from a seed: nonsense, and messages that are almost right.

What a message is made of is read from the wire's own types, so that new messages and fields are fuzzed without being
named here.
"""

import random
from dataclasses import dataclass

import msgspec
from msgspec import inspect

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.wire import messages as m
from kvferry.wire.codec import frame_of

LAYOUT = describe(attention(2, 2, 4, "float32", 4), EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)[0]
PARTY = m.Party("p0", "e1", 0)
TRANSPORTS = (m.TransportOffer("shm", b"\x00\xff", ""),)
OFFER = m.Offer(PARTY, LAYOUT, TRANSPORTS, m.Probe(4096, 64, 7))
TARGET_OFFER = m.TargetOffer(PARTY, (LAYOUT,), TRANSPORTS, m.Probe(4096, 64, 7))
CLAIM = m.Claim(PARTY, "c", m.Reference("p0", "e1", "r", "l"), 12, (0,))
EXTREMES = (0, 1, -1, 255, 1 << 16, 1 << 31, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
# Lengths that are announced and never come: of strings, bytes, arrays and maps.
ANNOUNCED = (b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9")
WRONG_TYPES = (None, True, 1.5, float("nan"), "", b"", [], {}, -1, "x" * 300, [[]] * 3)
MAX_ITEMS = 4


@dataclass(frozen=True)
class Kind:
    """One way to make a frame and how often it is chosen."""

    make: str
    weight: int


KINDS = (
    Kind("noise", 15),
    Kind("damaged", 30),
    Kind("random_message", 30),
    Kind("announced", 8),
    Kind("nested", 2),
    Kind("large", 1),
)


class FrameMaker:
    """Endless frames; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._types = inspect.multi_type_info(list(m.Message.__args__))
        self._real = [msgspec.msgpack.encode(real) for real in (OFFER, TARGET_OFFER, CLAIM)]
        self._makers = [getattr(self, kind.make) for kind in KINDS]
        self._weights = [kind.weight for kind in KINDS]

    def frame(self) -> bytes:
        """Nearly always with the right beginning and checksum: else nothing would get past those."""
        (make,) = self.random.choices(self._makers, self._weights)
        frame = bytearray(frame_of(make()))
        match self.random.randint(0, 19):
            case 0:
                frame[2] = self.random.randint(0, 255)
            case 1:
                frame[self.random.randrange(len(frame))] ^= 1 << self.random.randint(0, 7)
            case 2:
                del frame[self.random.randrange(len(frame)) :]
        return bytes(frame)

    def parts(self) -> list[bytes]:
        """A ZeroMQ message: nearly always one part, as it should be."""
        if self.random.random() < 0.97:
            return [self.frame()]
        return [self.random.choice((b"", self.frame())) for _ in range(self.random.randint(2, 8))]

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.randint(0, 200))

    def large(self) -> bytes:
        return self.random.randbytes(1) * self.random.randint(1 << 10, 1 << 17)

    def announced(self) -> bytes:
        """A real beginning, and then a value that says it is very long."""
        frame = self.random.choice(self._real)
        cut = self.random.randint(0, len(frame))
        return frame[:cut] + self.random.choice(ANNOUNCED) + self.random.randbytes(4) + self.random.randbytes(8)

    def nested(self) -> bytes:
        return self.random.choice((b"\x91", b"\x81\xa1a", b"\x81\xa4type", b"\x81\x91")) * self.random.randint(10, 5000)

    def damaged(self) -> bytes:
        frame = bytearray(self.random.choice((*self._real, self.random_message())))
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(frame))
            match self.random.randint(0, 3):
                case 0:
                    frame[place] ^= 1 << self.random.randint(0, 7)
                case 1:
                    frame[place] = self.random.randint(0, 255)
                case 2:
                    del frame[place + 1 :]
                case _:
                    frame[place:place] = frame[: self.random.randint(0, 40)]
        return bytes(frame)

    def random_message(self) -> bytes:
        """Right by its types, with any values; sometimes one value of a wrong type."""
        wrongness = self.random.choice((0.0, 0.0, 0.02, 0.2))
        value = self.value(self.random.choice(self._types), wrongness)
        try:
            return msgspec.msgpack.encode(value)
        except (OverflowError, ValueError):
            return b"\xc1"

    def value(self, kind: inspect.Type, wrongness: float) -> object:
        """Anything that msgpack can hold for a type of the wire."""
        if self.random.random() < wrongness:
            return self.random.choice(WRONG_TYPES)
        match kind:
            case inspect.StructType() | inspect.DataclassType():
                return self._record(kind, wrongness)
            case inspect.VarTupleType() | inspect.ListType():
                number = self.random.choice((0, 1, 1, 2, MAX_ITEMS))
                return [self.value(kind.item_type, wrongness) for _ in range(number)]
            case inspect.TupleType():
                return [self.value(each, wrongness) for each in kind.item_types]
            case inspect.UnionType():
                return self.value(self.random.choice(kind.types), wrongness)
            case inspect.Metadata():
                return self.value(kind.type, wrongness)
            case _:
                return self._plain(kind, is_legal=not wrongness)

    def _record(self, kind: inspect.StructType | inspect.DataclassType, wrongness: float) -> object:
        value = {each.encode_name: self.value(each.type, wrongness) for each in kind.fields}
        if isinstance(kind, inspect.StructType) and kind.tag is not None:
            value = {kind.tag_field: kind.tag} | value
        if self.random.random() < wrongness:
            value.pop(self.random.choice(list(value)))
        return list(value.values()) if getattr(kind, "array_like", False) else value

    def _plain(self, kind: inspect.Type, is_legal: bool) -> object:
        match kind:
            case inspect.IntType():
                number = self.random.randint(0, 9)
                return number if is_legal else self.random.choice((number, self.random.choice(EXTREMES)))
            case inspect.FloatType():
                return self.random.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
            case inspect.StrType():
                return self.random.choice(("", "p0", "e1", "l", "\u20ac\x00", "x" * self.random.randint(0, 250)))
            case inspect.BytesType():
                return self.random.randbytes(self.random.randint(0, 64))
            case inspect.EnumType():
                return self.random.choice(list(kind.cls)).value
            case inspect.BoolType():
                return self.random.random() < 0.5
            case _:
                return None

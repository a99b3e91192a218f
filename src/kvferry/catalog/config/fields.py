"""The fields of a config, none of which is trusted: every reading checks type and bounds and names the culprit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvferry.errors import ConfigurationError

MAX_NUMBER = 2**24
"""No size of a model comes near it; what lies above is an accident or an attack."""

MAX_LAYERS = 4096
BY_NUMBERS = "without a config, plan with --layers, --heads, --head-dim and --dtype"

_OF_OTHERS: Mapping[str, str] = {
    "patch_size": "images",
    "image_size": "images",
    "vision_config": "images",
    "num_mel_bins": "sounds",
    "conv_kernel": "sounds",
    "_class_name": "a diffusion pipeline",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """A config's fields by name; `source` (a file or a name) begins every error.

    Most readers take several names for the same thing: the first that is given counts, and all of them count as read.
    `null` and `"auto"` mean that a field is not given. Every reading raises ConfigurationError for a value of the wrong
    type or size. `used` are the names that somebody has asked for, those of nested objects behind their `prefix`, and
    `taken` those whose values counted, with what for: the `purpose` of who asked.
    """

    source: str
    values: Mapping[str, object]
    prefix: str = ""
    used: set[str] = field(default_factory=set, compare=False)
    taken: dict[str, dict[str, None]] = field(default_factory=dict, compare=False)
    purpose: str = "what kinds of layers there are"

    def has(self, *names: str) -> bool:
        """Whether one of the fields is given."""
        return bool(self._given(names))

    def number(self, *names: str) -> int:
        """A whole number from 1 to MAX_NUMBER that must be given."""
        name = self._given(names)
        if not name:
            raise self.missing(*names)
        return self._whole(name, self.values[name], 1)

    def number_or(self, absent: int, *names: str) -> int:
        """The same, or `absent`."""
        return self.number(*names) if self.has(*names) else absent

    def count(self, *names: str) -> int:
        """A whole number from 0 to MAX_NUMBER; 0 when it is not given."""
        name = self._given(names)
        return self._whole(name, self.values[name], 0) if name else 0

    def flag(self, name: str, absent: bool) -> bool:
        """A boolean, or `absent`."""
        value = self.raw(name)
        if value is None:
            return absent
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def word(self, *names: str) -> str:
        """A string; empty when it is not given."""
        name = self._given(names)
        value = self.values[name] if name else ""
        if not isinstance(value, str):
            raise self.wrong(name, value, "a word")
        return value

    def words(self, *names: str) -> tuple[str, ...]:
        """A list of strings, one per layer; empty when it is not given."""
        return tuple(self._text(names[0], item) for item in self._items(*names))

    def counts(self, *names: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 to MAX_NUMBER; empty when it is not given."""
        return tuple(self._whole(names[0], item, 0) for item in self._items(*names))

    def inner(self, *names: str) -> Fields:
        """The fields of a nested object; none when it is not given."""
        name = self._given(names)
        value = self.values[name] if name else {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object with fields of its own")
        if not name:
            return Fields(self.source, {})
        prefix = f"{self.prefix}{name}."
        return replace(self, source=f"{self.source}, {name}", values=value, prefix=prefix)

    def inners(self, name: str) -> tuple[Fields, ...]:
        """The fields of each object in a list, which counts as read as a whole; none when it is not given."""
        items = self._items(name)
        for item in items:
            if not isinstance(item, Mapping):
                raise self.wrong(name, item, "a list of objects with fields of their own")
        named = ((f"{self.source}, {name}[{number}]", item) for number, item in enumerate(items))
        return tuple(Fields(source, item) for source, item in named if isinstance(item, Mapping))

    def skip(self, *names: str) -> None:
        """These mean nothing here: others say the same, or they are about what the model does not have."""
        self.used.update(self.prefix + name for name in names)

    def raw(self, name: str) -> object:
        """Whatever is given, None without; the reader checks it."""
        self._given((name,))
        return self.values.get(name)

    def value_at(self, path: str) -> object:
        """What is given at a name, in nested objects at one with dots."""
        value: object = self.values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def without(self, name: str) -> Fields:
        """All but one."""
        return self.with_values({other: value for other, value in self.values.items() if other != name})

    def all_numbers(self) -> Iterator[tuple[str, int]]:
        """Every field that is given, each of which is to be a whole number from 0 to MAX_NUMBER."""
        for name, value in self.values.items():
            if value is not None:
                yield name, self._whole(name, value, 0)

    def with_values(self, values: Mapping[str, object]) -> Fields:
        """Other values of the same fields."""
        return replace(self, values=values)

    def about(self, purpose: str) -> Fields:
        """The same, for somebody who asks for another reason."""
        return replace(self, purpose=purpose)

    def unused(self) -> Iterator[tuple[str, object]]:
        """What is given and nobody has asked for; of nested objects that somebody has looked into, their fields."""
        for name, value in self.values.items():
            path = self.prefix + name
            if path not in self.used:
                yield path, value
            elif isinstance(value, Mapping):
                yield from Fields(self.source, value, f"{path}.", self.used).unused()

    def quotient(self, dividend: int, divisor: int, what: str) -> int:
        """`dividend / divisor`, which must be whole."""
        if dividend < divisor or dividend % divisor:
            raise ConfigurationError(
                f"{self.source}: {what} is not a whole number",
                found=f"{dividend} / {divisor}",
                expected="the first to be a multiple of the second",
                hint=BY_NUMBERS,
            )
        return dividend // divisor

    def missing(self, *names: str) -> ConfigurationError:
        """The error for a field that must be given."""
        return ConfigurationError(
            f"{self.source}: field {' or '.join(names)} is missing",
            found=self._kind(),
            expected="the config of a language model",
            hint=BY_NUMBERS,
        )

    def wrong(self, name: str, value: object, expected: str) -> ConfigurationError:
        """The error for a field that is given but cannot be meant so."""
        return ConfigurationError(
            f"{self.source}: field {name} cannot be used",
            found=short(value),
            expected=expected,
            hint=BY_NUMBERS,
        )

    def _kind(self) -> str:
        """What the config is of, as far as it says."""
        own = [name for name in self.values if name not in ("dtype", "model_type")]
        seen = next((f"a model of {what}, by its {name}" for name, what in _OF_OTHERS.items() if name in own), "")
        family = f"model_type {self.values['model_type']}" if self.values.get("model_type") else "no model_type"
        return f"{family}, {seen or ('and ' + ', '.join(own[:4]) if own else 'and nothing else')}"[:200]

    def _given(self, names: tuple[str, ...]) -> str:
        self.used.update(self.prefix + name for name in names)
        found = next((name for name in names if self.values.get(name) not in (None, "auto")), "")
        if found:
            self.taken.setdefault(self.prefix + found, {})[self.purpose] = None
        return found

    def _whole(self, name: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
            raise self.wrong(name, value, f"a whole number from {least} to {MAX_NUMBER}")
        return value

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong(name, value, "a list of words")
        return value

    def _items(self, *names: str) -> list[object]:
        name = self._given(names)
        value = self.values[name] if name else []
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise self.wrong(name, value, f"a list of at most {MAX_LAYERS}")
        return list(value)


def short(value: object) -> str:
    """The beginning of a value, without formatting all of it when it is huge."""
    if isinstance(value, list | tuple | Mapping):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number of more than 64 bits"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) < 100 else text[:100] + "…"

"""The fields of a config, none of which is trusted: every reading checks type and bounds and names the culprit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import ConfigurationError

MAX_NUMBER = 2**24
"""No size of a model comes near it; what lies above is an accident or an attack."""

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Fields:
    """A config's fields by name; `source` (a file or a name) begins every error.

    Most readings take several names for the same thing: the first that is given counts. `null` and `"auto"` mean
    that a field is not given. Every reading raises ConfigurationError for a value of the wrong type or size.
    """

    source: str
    values: Mapping[str, object]

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
        value = self.values.get(name)
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
        return Fields(f"{self.source}, {name}" if name else self.source, value)

    def quotient(self, dividend: int, divisor: int, what: str) -> int:
        """`dividend / divisor`, which must be whole."""
        if dividend < divisor or dividend % divisor:
            raise ConfigurationError(
                f"{self.source}: {what} is not a whole number",
                found=f"{dividend} / {divisor}",
                expected="the first to be a multiple of the second",
                hint="compare the fields with the model's own config.json",
            )
        return dividend // divisor

    def missing(self, *names: str) -> ConfigurationError:
        """The error for a field that must be given."""
        return ConfigurationError(
            f"{self.source}: field {' or '.join(names)} is missing",
            expected="a config.json that describes a language model",
            hint="pass the model's own config.json, as it was saved with its weights",
        )

    def wrong(self, name: str, value: object, expected: str) -> ConfigurationError:
        """The error for a field that is given but cannot be meant so."""
        return ConfigurationError(
            f"{self.source}: field {name} cannot be used",
            found=_short(value),
            expected=expected,
            hint="compare it with the model's own config.json",
        )

    def _given(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.values.get(name) not in (None, "auto")), "")

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


def _short(value: object) -> str:
    """The beginning of a value, without formatting all of it when it is huge."""
    if isinstance(value, list | tuple | Mapping):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number of more than 64 bits"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) < 100 else text[:100] + "…"

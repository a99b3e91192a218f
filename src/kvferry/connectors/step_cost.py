"""How long a step of a larger model would take, for engines whose own model is tiny. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import ConfigurationError

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXAMPLE = "such as token=1.2ms,step=50ms,sequence=0.3ms,overlap=0.5"


@dataclass(frozen=True, slots=True)
class StepCost:
    """`token_s` to compute one token of a prompt; `step_s` to read the weights, once a step; `sequence_s` for one token
    of one answer, most of it to read that sequence's cache.

    `overlap` says how much of the shorter of computing prompts and the rest hides behind the longer: 1 is the roofline,
    0 means that they take turns.
    """

    token_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    overlap: float = 0.0

    def seconds(self, num_tokens: int, num_sequences: int) -> float:
        """A step that computes `num_tokens` tokens of prompts, and the next one of each of `num_sequences` answers."""
        computing_s, reading_s = num_tokens * self.token_s, self.step_s + num_sequences * self.sequence_s
        return computing_s + reading_s - self.overlap * min(computing_s, reading_s)


NO_COST = StepCost()


def step_cost_named(text: str) -> StepCost:
    """`token=1.2ms,step=50ms,sequence=0.3ms,overlap=0.5`, any of them; empty for no cost. Raises ConfigurationError."""
    values: dict[str, float] = {}
    for word in text.split(",") if text else ():
        timed = re.fullmatch(r"(token|step|sequence)=(\d+(?:\.\d+)?)(us|ms|s)", word.strip(), re.ASCII)
        plain = re.fullmatch(r"(overlap)=(0(?:\.\d+)?|1(?:\.0+)?)", word.strip(), re.ASCII)
        found = timed or plain
        if found is None:
            raise ConfigurationError("unknown kind of step cost", found=word.strip() or text, expected=EXAMPLE)
        name = f"{found[1]}_s" if timed else found[1]
        if name in values:
            raise ConfigurationError("a step cost is given more than once", found=text, expected=EXAMPLE)
        values[name] = float(found[2]) * (UNITS_S[timed[3]] if timed else 1.0)
    return StepCost(**values)

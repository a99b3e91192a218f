"""What came of many runs, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulator.report.outcome import Outcome

MAX_LISTED = 20


@dataclass(slots=True)
class Summary:
    """Sums over runs; `violations` by seed."""

    num_runs: int = 0
    virtual_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.num_runs += 1
        self.virtual_s += outcome.virtual_s
        self.outcomes.update(outcome.outcomes)
        self.injected.update(outcome.injected)
        if outcome.violation:
            self.violations[outcome.seed] = outcome.violation

    def as_json(self, elapsed_s: float) -> dict[str, object]:
        """Everything, for programs."""
        return {
            "runs": self.num_runs,
            "elapsed_s": round(elapsed_s, 3),
            "virtual_s": round(self.virtual_s, 3),
            "outcomes": dict(self.outcomes.most_common()),
            "injected": dict(self.injected.most_common()),
            "violations": {str(seed): self.violations[seed] for seed in sorted(self.violations)},
        }

    def as_text(self, elapsed_s: float) -> str:
        """Everything, for people."""
        lines = [
            f"{self.num_runs:,} runs, {self.virtual_s / 3600:,.1f} hours of virtual time in {elapsed_s:,.0f} s",
            "",
            *_columns("what went wrong", self.injected, "how requests ended", self.outcomes),
            "",
        ]
        if not self.violations:
            return "\n".join([*lines, "no violation"])
        lines.append(f"{len(self.violations):,} runs with a violation; replay one with: SEED=n make simulate")
        lines += [f"  seed {seed}: {self.violations[seed]}" for seed in sorted(self.violations)[:MAX_LISTED]]
        return "\n".join(lines)


def _columns(left_title: str, left: Counter[str], right_title: str, right: Counter[str]) -> list[str]:
    lefts = [f"{left_title:<22}{'':>10}", *(f"{name:<22}{number:>10,}" for name, number in left.most_common())]
    rights = [right_title, *(f"{name:<28}{number:>10,}" for name, number in right.most_common())]
    height = max(len(lefts), len(rights))
    lefts += [" " * 32] * (height - len(lefts))
    rights += [""] * (height - len(rights))
    return [f"{one}    {other}".rstrip() for one, other in zip(lefts, rights, strict=True)]

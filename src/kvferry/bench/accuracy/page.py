"""What came of it as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

from kvferry.bench.accuracy.comparison import Comparison, Measured
from kvferry.bench.report.page import Axis, Chart, Section, Series, histogram, render, round_up


def accuracy_page(title: str, measured: Measured, faults: list[str]) -> str:
    """Differences of log-probabilities, and where answers begin to differ, of the split and of the control."""
    words = "The split does not answer as the whole does: " if faults else "The split answers as the whole does."
    runs = {"Split": measured.split, "Whole, in other batches": measured.control}
    return render(
        title, words + "; ".join(faults), [_section(name, run) for name, run in runs.items() if run is not None]
    )


def _section(name: str, run: Comparison) -> Section:
    lengths = [float(len(answer.tokens)) for answer in run.run.answers]
    numbers = {item.name: float(number) for number, item in enumerate(run.items, 1)}
    different = tuple((numbers[prompt], float(token + 1)) for prompt, token in run.divergences.items())
    axes = Axis("prompt", round_up(len(numbers))), Axis("token", round_up(max(lengths, default=1.0)))
    apart = f"log-probabilities differ by {run.mean_difference:.2g} on average"
    return Section(
        title=name,
        words=f"{run.num_equal} of {run.num_compared} answers equal; {apart}",
        charts=(
            histogram("Difference of log-probability, by token", run.differences, "nats"),
            Chart("Where answers begin to differ", *axes, series=(Series("bad", different),)),
        ),
    )

"""Long work says how far it is, also where nobody looks at a terminal."""

from kvferry.cli.bench import progress
from kvferry.cli.bench.progress import BenchProgress


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.console, "say", said.append)
    with BenchProgress() as shown:
        task = shown.add_task("prompts", total=400)
        for _ in range(250):
            now[0] += 0.125
            shown.update(task, advance=1)
    assert said == ["prompts: 80 of 400", "prompts: 160 of 400", "prompts: 240 of 400"]

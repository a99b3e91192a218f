"""`kvferry doctor`: what this machine can do for transfers, what is chosen and why, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvferry import read_token
from kvferry.cli import console
from kvferry.cli.doctor.command import DoctorOptions
from kvferry.cli.doctor.machine_facts import Fact, machine_facts, machine_findings, setting_facts, ucx_facts
from kvferry.cli.doctor.transport_tests import Trials, loopback, verdict
from kvferry.errors import ConfigurationError, FerryError
from kvferry.extras import missing_modules
from kvferry.plan.programs.copies import Direction
from kvferry.staging.device.table import check_pair, devices, load_devices
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding, Severity, finding_of, worst
from kvferry.transport.machine.hardware import KINDS, accelerators
from kvferry.transport.selection.measurement import UNMEASURED, Measurement, Rates
from kvferry.transport.ucx.environment import prepare, silence_libraries, system_facts
from kvferry.transport.ucx.introspection import UcxIntrospection

EXIT_CODES: Final = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}
STYLES: Final = {Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
VERDICTS: Final = {
    Severity.OK: "Ready for transfers",
    Severity.NOTE: "Ready for transfers",
    Severity.WARNING: "Ready for transfers, with warnings",
    Severity.ERROR: "Not ready for transfers as set up",
}
NO_AGENT: Final = "Transports can be tried, but engines cannot use them: kvferry[agent] is not installed"
LOOPBACK: Final = "Loopback: host memory of another process of this machine"
WHERE: Final = {"loopback": "on this host", "peer": "to the peer"}
NAME_WIDTH: Final = 28
LEAST_WIDTH: Final = 20
NOT_TRIED: Final = "not tried"
TITLES: Final = {"ucx": "UCX (what NIXL moves bytes with)", "settings": "Settings, and where they come from"}


@dataclass(frozen=True, slots=True)
class _Report:
    """Everything that is printed. `trials` are named `loopback` and `peer`."""

    facts: tuple[Fact, ...]
    trials: dict[str, Trials]
    findings: tuple[Finding, ...]


def doctor(options: DoctorOptions) -> int:
    """Look at everything, print it, and return the exit code: 0, with warnings 1, with errors 2.

    Raises what is wrong with the options themselves, before anything is tried.
    """
    silence_libraries()
    load_devices()
    _check(options)
    report = _examine(options)
    if options.as_json:
        console.data(_as_json(report))
    else:
        _print(report, Console(markup=False, emoji=False, highlight=False))
    return EXIT_CODES[worst(report.findings)]


def _check(options: DoctorOptions) -> None:
    device, buffer_device, _ = _devices(options)
    if options.device or options.buffer_device:
        check_pair(device, buffer_device)
    if options.peer:
        # Not at the top: without a peer, the command does without the control channel's libraries.
        from kvferry.cli.doctor.peer import endpoint_of

        endpoint_of(options.peer, read_token(options.token_file))


def _examine(options: DoctorOptions) -> _Report:
    device, buffer_device, origins = _devices(options)
    # Engines without a token have peers on their own host only.
    place = Place.UNKNOWN if options.token_file else Place.SAME_HOST
    findings: list[Finding] = []
    skipped: dict[str, str] = {}
    environment = None
    try:
        prepared = prepare(device, buffer_device, place)
        environment = prepared.environment
        findings += [*environment.warnings, *prepared.late]
    except ConfigurationError as error:
        findings.append(finding_of(error))
        skipped["nixl"] = f"{NOT_TRIED}: see the findings"

    def say(text: str) -> None:
        if not options.as_json:
            console.say(f"{text} …")

    trials = {"loopback": loopback(say, skipped)}
    if options.peer:
        from kvferry.cli.doctor.peer import try_peer

        try:
            trials["peer"] = try_peer(options.peer, read_token(options.token_file), say)
        except FerryError as error:
            findings.append(finding_of(error))
    system = system_facts(device, buffer_device, place)
    facts = (
        *machine_facts(system),
        *ucx_facts(system, UcxIntrospection().version),
        *(Fact("settings", name, value, origin) for name, value, origin in origins),
        *setting_facts(environment, system, options.token_file),
    )
    findings += machine_findings(system, options.token_file)
    findings += _missing(device)
    findings += [finding for each in trials.values() for finding in each.findings]
    return _Report(facts, trials, tuple(dict.fromkeys(findings)))


def _devices(options: DoctorOptions) -> tuple[str, str, list[tuple[str, str, str]]]:
    """The device and the buffer device, and where both come from."""
    found = [each.kind for each in accelerators() if each.kind in devices()]
    device = options.device or (found[0] if found else "cpu")
    buffer_device = options.buffer_device or devices().get(device, ("cpu",))[0]
    chosen = "chosen" if found else "default"
    origins = [
        ("device", device, "option" if options.device else chosen),
        ("buffer device", buffer_device, "option" if options.buffer_device else chosen),
    ]
    return device, buffer_device, origins


def _missing(device: str) -> Iterator[Finding]:
    """A warning where the report is for a kind of device that this machine does not have."""
    if device in KINDS and device not in {each.kind for each in accelerators()}:
        what = f"this machine has no {device} device; the report describes a machine that has one"
        hint = "omit --device to check the devices of this machine"
        yield Finding(Severity.WARNING, what, "none on the PCI bus", device, hint)


def _as_json(report: _Report) -> dict[str, Any]:
    return {
        "severity": str(worst(report.findings)),
        "findings": [asdict(finding) for finding in report.findings],
        "facts": [asdict(fact) for fact in report.facts],
        "trials": {name: _trials_as_json(trials) for name, trials in report.trials.items()},
    }


def _trials_as_json(trials: Trials) -> dict[str, Any]:
    rows = [
        {"transport": found.name, "error": found.error, "carriers": list(found.carriers)}
        | {str(direction): _rates_as_json(found.rates(direction)) for direction in Direction}
        for found in trials.measurements
    ]
    return {"place": str(trials.place), "chosen": verdict(trials.measurements), "transports": rows}


def _rates_as_json(rates: Rates) -> dict[str, Any]:
    """Infinite times have no place in JSON: what failed has no figures."""
    return {"error": rates.error} if rates.error else asdict(rates)


def _print(report: _Report, screen: Console) -> None:
    """Print the verdict first, then what it follows from."""
    screen.print(_verdict(report), style=STYLES.get(worst(report.findings), "green"), soft_wrap=not screen.is_terminal)
    if report.findings:
        screen.print("\nFindings", style="bold")
    for finding in report.findings:
        _print_finding(screen, finding)
    _print_trials(report, screen)
    for section, facts in groupby(report.facts, key=lambda fact: fact.section):
        screen.print(f"\n{TITLES.get(section, section.capitalize())}", style="bold")
        for fact in facts:
            origin = f" ({fact.origin})" if section == "settings" else ""
            _line(screen, f"{fact.name}{origin}", fact.value)


def _verdict(report: _Report) -> str:
    """Whether transfers work here, over what, and how much there is to read."""
    counts = Counter(finding.severity for finding in report.findings)
    words = {severity: f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in counts.items()}
    found = [words[severity] for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE) if severity in words]
    state = NO_AGENT if missing_modules("agent") else VERDICTS[worst(report.findings)]
    taken = [f"{verdict(trials.measurements)} {WHERE[name]}" for name, trials in report.trials.items()]
    return f"{state} ({', '.join(found) or 'no findings'}). --transport auto takes {' and '.join(taken)}."


def _print_trials(report: _Report, screen: Console) -> None:
    for name, trials in report.trials.items():
        screen.print(f"\n{LOOPBACK if name == 'loopback' else f'Peer ({trials.place})'}", style="bold")
        for found in trials.measurements:
            _line(screen, found.name, _words(found))
        _line(screen, "auto takes", verdict(trials.measurements))


def _words(found: Measurement) -> str:
    if found.error:
        is_absent = found.error.startswith(NOT_TRIED) or "is not installed" in found.error
        return found.error if is_absent else f"does not work: {found.error}"
    is_itself = found.carriers in ((), (found.name,))
    carriers = "" if is_itself else f", carried by {' and '.join(found.carriers)}"
    written = found.writing
    writes = "" if written == UNMEASURED else f"; writes {written.error or written}"
    latency = f"{found.latency_s * 1e6:.0f} µs for 4 KiB"
    rates = f"{found.gigabytes_per_s:.1f} GB/s, {found.row_gigabytes_per_s:.1f} in rows of 4 KiB"
    return f"reads {rates}{writes}; {latency}{carriers}"


def _line(screen: Console, name: str, value: str) -> None:
    head = f"  {name:<{NAME_WIDTH}} " if len(name) <= NAME_WIDTH else f"  {name}\n{'':{NAME_WIDTH + 3}}"
    _print_beside(screen, head, value, NAME_WIDTH + 3)


def _print_beside(screen: Console, head: str, text: str, indent: int, style: str = "") -> None:
    """Print text behind a head, wrapped on a terminal only: whoever reads from a pipe looks for whole lines."""
    lines = [text]
    if screen.is_terminal:
        lines = [line.plain for line in Text(text).wrap(screen, max(LEAST_WIDTH, screen.width - indent))]
    screen.print(Text(head + f"\n{'':{indent}}".join(lines), style=style), soft_wrap=True)


def _print_finding(screen: Console, finding: Finding) -> None:
    _print_beside(screen, "  ", f"{finding.severity}: {finding.what}", 4, STYLES[finding.severity])
    for name, text in (("found", finding.found), ("expected", finding.expected), ("hint", finding.hint)):
        if text:
            _print_beside(screen, f"    {name + ':':<10}", text, 14)

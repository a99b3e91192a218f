"""`kvferry doctor --vllm-args`: what of a server with vLLM's own NIXL connector carries over, and its new arguments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from rich.console import Console

from kvferry.cli import console
from kvferry.cli.serve.vllm import EXTENSION, MIDDLEWARE
from kvferry.connectors.vllm_keys import ExtraConfig, IgnoredKeys
from kvferry.connectors.vllm_plugin import MODULE, NAME
from kvferry.errors import ConfigurationError
from kvferry.transport.machine.finding import Finding, Severity, worst

OPTION: Final = "--kv-transfer-config"
# vLLM takes underscores as well.
BEFORE_JSON: Final = re.compile(rf"(?<!\S){OPTION.replace('-', '[-_]')}(?:=|\s+)(?P<quote>['\"]?)(?={{)")
STOCK: Final = "NixlConnector"
MULTI: Final = "MultiConnector"
MODULE_KEY: Final = "kv_connector_module_path"
EXTRA: Final = "kv_connector_extra_config"
REFUSED: Final = {
    "--enable-sleep-mode": "an engine that sleeps gives away the memory that others read its caches from",
    "--enable-return-routed-experts": "routed experts of a prompt exist only where it was computed",
}
CLASS_OPTION: Final = "--worker-extension-cls"
POLICY: Final = "kv_load_failure_policy"


@dataclass(frozen=True, slots=True)
class Migration:
    """New arguments, and what is to be said about the old ones."""

    arguments: tuple[str, ...]
    findings: tuple[Finding, ...]


def tell(text: str, as_json: bool) -> int:
    """Print what changes, and the new arguments; the exit code is 0, 1 with warnings, 2 with errors.

    Raises ConfigurationError for arguments without a transfer configuration that can be read.
    """
    found = migrate(text)
    severity = worst(found.findings)
    command = shlex.join(found.arguments)
    if as_json:
        findings = [asdict(finding) for finding in found.findings]
        console.data({"severity": severity, "findings": findings, "arguments": list(found.arguments)})
    else:
        for finding in found.findings:
            console.say(f"{finding.severity}: {finding}")
        Console(markup=False, emoji=False, highlight=False).print(command, soft_wrap=True)
    return {Severity.ERROR: 2, Severity.WARNING: 1}.get(severity, 0)


def migrate(text: str) -> Migration:
    """The arguments of the same server with kvferry's connector. Raises ConfigurationError."""
    before, config, after = _divided(text)
    findings: list[Finding] = []
    new = _connector(config, findings)
    words = (*before, *after)
    findings += _refused(words)
    # vLLM takes several middlewares, and one class.
    added = [] if any(word.endswith(MIDDLEWARE) for word in words) else ["--middleware", MIDDLEWARE]
    if not any(word.partition("=")[0] == CLASS_OPTION for word in words):
        added += [CLASS_OPTION, EXTENSION]
    elif not any(word.endswith(EXTENSION) for word in words):
        what, hint = "this server has a worker extension of its own", f"let your class inherit from {EXTENSION}"
        findings.append(Finding(Severity.WARNING, what, CLASS_OPTION, hint=hint))
    return Migration((*before, OPTION, json.dumps(new), *after, *added), tuple(findings))


def _divided(text: str) -> tuple[list[str], dict[str, Any], list[str]]:
    """The words before the transfer configuration, what that says, and the words behind it.

    Whoever pastes a command line between quotes has lost those around its JSON.
    """
    if found := BEFORE_JSON.search(text):
        with suppress(json.JSONDecodeError):
            config, end = json.JSONDecoder().raw_decode(text, found.end())
            end += len(found["quote"])
            return _words(text[: found.start()]), _object(json.dumps(config)), _words(text[end:])
    words = _words(text)
    for number, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name.replace("_", "-") == OPTION:
            behind = number + (1 if sign else 2)
            given = value if sign else "".join(words[number + 1 : behind])
            return words[:number], _object(given), words[behind:]
    raise ConfigurationError(
        "these arguments have no transfer configuration",
        found=" ".join(words) or "nothing",
        expected=f"{OPTION} with the JSON that names {STOCK}",
        hint=f"write {OPTION}.key=value as JSON" if f"{OPTION}." in text.replace("_", "-") else "",
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        what = "the arguments cannot be read"
        raise ConfigurationError(what, found=str(error), expected="words of a shell") from error


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{OPTION} cannot be read", found=str(error), expected="a JSON object") from error


def _connector(config: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """The same connector, kvferry's in place of the stock one; of several, the one among them."""
    name, extra = config.get("kv_connector"), _extra(config)
    if name == MULTI and isinstance(extra.get("connectors"), list):
        # vLLM asks the outer configuration for it, and kvferry's connector its own.
        policy = {POLICY: config[POLICY]} if POLICY in config else {}
        children = [_child(child, policy, findings) for child in extra["connectors"]]
        # vLLM passes on what the first connector says of its ranks that says anything.
        children.sort(key=lambda child: child.get("kv_connector") != NAME)
        if not any(child.get("kv_connector") == NAME for child in children):
            raise _no_stock(name)
        return {**config, EXTRA: {**extra, "connectors": children}}
    if name not in (STOCK, NAME):
        raise _no_stock(name)
    return _ours(config, findings)


def _child(child: Any, policy: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    if not isinstance(child, dict):
        what = f"the connectors of {MULTI} cannot be read"
        raise ConfigurationError(what, found=str(child), expected="a JSON object for each")
    return _ours({**policy, **child}, findings) if child.get("kv_connector") in (STOCK, NAME) else child


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    extra = config.get(EXTRA) or {}
    if not isinstance(extra, dict):
        raise ConfigurationError(f"{EXTRA} cannot be read", found=str(extra), expected="a JSON object")
    return extra


def _no_stock(found: object) -> ConfigurationError:
    what = "kvferry takes the place of vLLM's own NIXL connector"
    return ConfigurationError(what, found=f"kv_connector {found}", expected=f"{STOCK}, alone or in {MULTI}")


def _ours(config: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    kept = {}
    for key, value in _extra(config).items():
        if key in IgnoredKeys.__struct_fields__:
            findings.append(Finding(Severity.NOTE, f"{key} means nothing here: left out", json.dumps(value)))
        elif key in ExtraConfig.__struct_fields__:
            kept[key] = value
        else:
            hint = "docs/vllm.md has the keys that there are"
            what = f"kvferry does not know {key}: left out"
            findings.append(Finding(Severity.WARNING, what, json.dumps(value), hint=hint))
    try:
        msgspec.convert(kept, ExtraConfig)
    except msgspec.ValidationError as error:
        hint = "docs/vllm.md says what each key is"
        findings.append(Finding(Severity.ERROR, "a value that kvferry refuses", str(error), hint=hint))
    if POLICY not in config:
        what = "a cache that does not arrive ends its request"
        hint = 'decide: "kv_load_failure_policy": "recompute" computes the prompt instead'
        findings.append(Finding(Severity.NOTE, what, f"{POLICY} is not given", "fail or recompute", hint))
    moved = {"kv_connector": NAME, MODULE_KEY: MODULE}
    return {**config, **moved, **({EXTRA: kept} if kept or EXTRA in config else {})}


def _refused(words: Sequence[str]) -> Iterator[Finding]:
    for word in words:
        if why := REFUSED.get(word.partition("=")[0]):
            yield Finding(Severity.ERROR, f"kvferry refuses this server: {why}", word, hint="leave it out")

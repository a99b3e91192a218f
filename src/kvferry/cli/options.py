"""Options of several commands, the panels of `--help`, commands made of records, and which options were given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast, get_origin, get_type_hints

import typer

from kvferry.cli import environment
from kvferry.cli.console import errors_as_messages
from kvferry.errors import ConfigurationError

if TYPE_CHECKING:
    from kvferry.http.access import Access

HERE = "127.0.0.1"
# Newer releases of typer have a click of their own inside.
USAGE_ERROR: Final = cast(type[Exception], typer.BadParameter.__base__)


class FailurePolicy(StrEnum):
    """What becomes of a request whose cache does not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


# What most people need stands first, in the panel that typer calls Options.
common = typer.Option
cache = partial(typer.Option, rich_help_panel="Advanced: model and cache")
moving = partial(typer.Option, rich_help_panel="Advanced: cache transfer")
addresses = partial(typer.Option, rich_help_panel="Advanced: addresses")
times = partial(typer.Option, rich_help_panel="Advanced: time limits, in seconds")
access = partial(typer.Option, rich_help_panel="Advanced: access")
output = partial(typer.Option, rich_help_panel="Advanced: output")

Model = Annotated[str, common(help="Model folder or Hugging Face name; tiny is built on this machine.")]
Engine = Annotated[str, common(help="transformers (built in), vllm or sglang; their own options come after --.")]
Host = Annotated[str, common(help="Address to listen on.")]
TokenFile = Annotated[str, common(help="File with the shared token; else KVFERRY_TOKEN_FILE.")]
Drain = Annotated[float, times(min=0.0, max=86400.0, help="Limit for open requests and leases after SIGTERM.")]
# Read before all others, so that an option that prints something and exits knows it, too.
Json = Annotated[bool, typer.Option("--json", is_eager=True, help="Print JSON on stdout.")]
Child = Annotated[bool, typer.Option("--as-child", hidden=True, help="Exit when standard input closes.")]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How engines move caches."""

    transport: Annotated[str, common(help="auto, shm, cma, tcp or nixl.")] = "auto"
    strategy: Annotated[str, moving(help="How caches are copied: auto, direct, scatter or pack.")] = "auto"
    transfer_direction: Annotated[
        str, moving(help="pull (the decode engine reads), push (the prefill engine writes) or auto.")
    ] = "auto"
    digest: Annotated[str, moving(help="How much of a received cache is verified: sampled, full or off.")] = "sampled"
    buffer_device: Annotated[
        str, moving(help="Device whose memory transports register: the one that computes (auto), or cpu.")
    ] = "auto"
    staging_memory: Annotated[
        str, moving(help="Where staging memory lies: host, or device where the buffer device is that.")
    ] = "host"

    def check(self) -> None:
        """Raises ConfigurationError for a value that is none of the choices."""
        from kvferry.options import digest_policy_named, direction_named, staging_memory_named
        from kvferry.session.target.read_strategy import allowed_by
        from kvferry.transport.registry import check_name

        check_name(self.transport)
        digest_policy_named(self.digest)
        direction_named(self.transfer_direction)
        staging_memory_named(self.staging_memory)
        allowed_by(self.strategy)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may use a server that a command starts."""

    api_key: Annotated[list[str], access(help="API key that clients need; repeatable. Else KVFERRY_API_KEY.")] = field(
        default_factory=list, repr=False
    )
    allowed_origins: Annotated[list[str], access(help="Web origin that browsers may come from, or *; repeatable.")] = (
        field(default_factory=list)
    )
    allowed_methods: Annotated[list[str], access(help="HTTP method for those origins; repeatable.")] = field(
        default_factory=lambda: ["*"]
    )
    allowed_headers: Annotated[list[str], access(help="Request header for those origins; repeatable.")] = field(
        default_factory=lambda: ["*"]
    )
    allow_credentials: Annotated[bool, access("--allow-credentials", help="Those origins may send cookies.")] = False

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(self.api_key) or environment.api_keys()

    def checked(self) -> Access:
        """The access that these options give. Raises ConfigurationError for an API key that cannot be used, and for
        what is said of origins where there are none."""
        from kvferry.http.access import Access

        is_about_origins = self.allow_credentials or [*self.allowed_methods, *self.allowed_headers] != ["*", "*"]
        if is_about_origins and not self.allowed_origins:
            found = "--allowed-methods, --allowed-headers or --allow-credentials without --allowed-origins"
            raise ConfigurationError("no web page could use that", found=found, expected="--allowed-origins as well")
        lists = tuple(self.allowed_origins), tuple(self.allowed_methods), tuple(self.allowed_headers)
        return Access(self.api_keys, *lists, self.allow_credentials)


Record = TypeVar("Record")
Work = Callable[[typer.Context, Record], int | None]


def command_of(record: type[Record], extras: str = "") -> Callable[[Work[Record]], Callable[..., None]]:
    """Make a command of a function that takes such a record and returns the exit code.

    The options of the command are the fields with annotations of typer, and those of fields that are records.
    `extras`, with commas, are the extras of kvferry that the command needs.
    """

    def decorate(work: Work[Record]) -> Callable[..., None]:
        @wraps(work)
        def command(context: typer.Context, **given: Any) -> None:
            with errors_as_messages(extras):
                _check_numbers(given)
                code = work(context, _record_of(record, given))
            raise typer.Exit(code or 0)

        first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        vars(command)["__signature__"] = Signature([first, *_parameters(record)])
        return command

    return decorate


def _parameters(record: Any) -> Iterator[Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for each in fields(record):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _parameters(hint)
        elif get_origin(hint) is Annotated:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            default = Parameter.empty if default is MISSING else default
            yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _check_numbers(given: dict[str, Any]) -> None:
    """Raises ConfigurationError for a value that is not a number: typer before 0.29 finds it within every range."""
    wrong = [option_of(name) for name, value in given.items() if isinstance(value, float) and math.isnan(value)]
    if wrong:
        raise ConfigurationError(f"{', '.join(wrong)}: not a number", found="nan", expected="a number")


def _record_of(record: Any, given: dict[str, Any]) -> Any:
    hints = get_type_hints(record)
    own = {each.name: given[each.name] for each in fields(record) if each.name in given}
    nested = {name: _record_of(hint, given) for name, hint in hints.items() if is_dataclass(hint)}
    return record(**own, **nested)


def context_of(words: Sequence[str], command: Callable[..., None]) -> typer.Context:
    """The context that a command line's words give; nothing is run. Raises ConfigurationError as the command would."""
    app = typer.Typer(add_completion=False)
    # An option that shows help would end the caller.
    app.command(context_settings={"allow_extra_args": True, "help_option_names": []})(command)
    try:
        context = cast(typer.Context, typer.main.get_command(app).make_context(command.__name__, list(words)))
    except USAGE_ERROR as error:
        what = f"kvferry {command.__name__} does not take these options"
        raise ConfigurationError(what, found=without_keys(words), hint=str(error)) from error
    _check_numbers(context.params)
    return context


def without_keys(words: Sequence[str]) -> str:
    """A command line as it was given, but for the keys in it: errors are shown to others, such as in a dashboard."""
    shown: list[str] = []
    for before, word in pairwise(("", *words)):
        name, joined, _ = word.partition("=")
        if _names_a_key(before) and "=" not in before:
            shown.append("HIDDEN")
        else:
            shown.append(f"{name}=HIDDEN" if joined and _names_a_key(name) else word)
    return shlex.join(shown)


def _names_a_key(word: str) -> bool:
    return word.startswith("-") and "key" in word.partition("=")[0]


def record_of(record: type[Record], context: typer.Context) -> Record:
    """The record that a command makes of its command line. Raises ConfigurationError."""
    return cast(Record, _record_of(record, context.params))


def option_of(name: str) -> str:
    """The option on the command line that sets the field of this name."""
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def check_unused(context: typer.Context, names: tuple[str, ...], beside: str) -> None:
    """Raises ConfigurationError for an option that would do nothing beside another."""
    given = [option_of(name) for name in names if is_given(context, name)]
    if given:
        hint = "leave one of them out"
        raise ConfigurationError(f"these options have no effect {beside}", found=", ".join(given), hint=hint)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line; otherwise its default applies."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_words(context: typer.Context, without: tuple[str, ...]) -> str:
    """The command line without some of its options, quoted for a shell."""
    words = [str(context.info_name)]
    # Without the program itself, which people call as they like.
    parent = context.parent
    while parent is not None and parent.parent is not None:
        words.insert(0, str(parent.info_name))
        parent = parent.parent
    for name, value in context.params.items():
        if name not in without and is_given(context, name):
            option = option_of(name)
            for each in value if isinstance(value, list) else [value]:
                words += [option] if each is True else [option, str(each)]
    return shlex.join(["kvferry", *words])


def passed_options(arguments: Sequence[str]) -> dict[str, str]:
    """The values of the options passed to an engine, by name, with dashes as vLLM writes them. The last of each counts.
    A value is the next word, or stands behind an equals sign."""
    found = dict[str, str]()
    for word, following in pairwise((*arguments, "")):
        name, joined, value = word.partition("=")
        if name.startswith("-"):
            found[name.replace("_", "-")] = value if joined else following
    return found

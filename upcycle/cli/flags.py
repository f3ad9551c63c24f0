"""Options models as flags of a command: each field's name, type, range, default and text."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from upcycle.options.base import section_in
from upcycle.options.stage import StageOptions


@dataclass(frozen=True)
class Only:
    """Of an options model, the fields that a command has flags for."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Explained:
    """What a command's flag for a field says beside the field's own text."""

    name: str
    text: str


@dataclass(frozen=True)
class Flags:
    """A parameter of a command that stands for the flags of an options model.

    Attributes:
        model: what the command gets.
        names: the fields that have flags.
        defaults: those that are not the model's own.
        explained: what flags say beside the fields' own texts, by name.
    """

    model: type[StageOptions]
    names: tuple[str, ...]
    defaults: dict[str, Any]
    explained: dict[str, str]

    def parameters(self) -> list[inspect.Parameter]:
        """The flags, each as a parameter that typer reads."""
        return [self._flag(name) for name in self.names]

    def take(self, context: typer.Context, arguments: dict[str, Any]) -> StageOptions:
        """Take the flags out of a command's arguments; only those that were given count as set.

        Raises:
            UpcycleError: a value that is not possible.
        """
        values = {name: arguments.pop(name) for name in self.names}
        given = {name: value for name, value in values.items() if _is_given(context, name)}
        return self.model(**{**self.defaults, **given})

    def _flag(self, name: str) -> inspect.Parameter:
        field = self.model.model_fields[name]
        kind, traits = _bare(field.annotation, field.metadata)
        text = " ".join(f"{field.description or ''} {self.explained.get(name, '')}".split())
        if get_origin(kind) is tuple:
            kind, text = list[str], f"{text.rstrip('.')}; may be repeated."
        elif get_origin(kind) is Literal or any(isinstance(t, BeforeValidator) for t in traits):
            kind = str  # which the model reads
        above = _bound(traits, "gt")
        option = typer.Option(
            self.model.flag(name),
            help=text,
            min=_bound(traits, "ge") if above is None else above + 1,
            max=_bound(traits, "le"),
        )
        default: Any = inspect.Parameter.empty
        if not field.is_required():
            default = self.defaults.get(name, field.default)
            if isinstance(default, tuple):
                default = [str(each) for each in default] or None
            kind = kind | None if default is None else kind
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def flags_of(parameter: inspect.Parameter) -> Flags | None:
    """The flags that a parameter stands for; None where it is an argument or a flag itself.

    Args:
        parameter: of an options model, `Annotated` with `Only` for some of its fields, and with
            `Explained`; its default holds the flags' defaults.
    """
    model, traits = _bare(parameter.annotation, [])
    if not (isinstance(model, type) and issubclass(model, StageOptions)):
        return None
    default = parameter.default
    set_there = {} if default is parameter.empty else default.model_fields_set
    return Flags(
        model,
        next((t.names for t in traits if isinstance(t, Only)), tuple(flagged(model))),
        {name: getattr(default, name) for name in set_there},
        {t.name: t.text for t in traits if isinstance(t, Explained)},
    )


def flagged(model: type[StageOptions]) -> list[str]:
    """The fields that a command line can say: all but those with fields of their own."""
    return [name for name, each in model.model_fields.items() if not section_in(each.annotation)]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _bare(kind: Any, traits: Iterable[Any]) -> tuple[Any, list[Any]]:
    """A type without None and annotations, and what these say."""
    found = list(traits)
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        for each in more:
            found += each.metadata if isinstance(each, FieldInfo) else [each]
    return kind, found


def _bound(traits: Iterable[Any], name: str) -> Any:
    return next((getattr(each, name) for each in traits if hasattr(each, name)), None)

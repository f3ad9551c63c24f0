"""What can be asked of a stage, written once: for flags, recipes, the API and manifests."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails

from upcycle.errors import UpcycleError
from upcycle.options.base import REFUSED, TEXT_WORDS, PathValue, Section

_GATHERS: ContextVar[bool] = ContextVar("gathers", default=False)


@contextmanager
def gathered() -> Iterator[None]:
    """Let all problems of options out as pydantic's ValidationError: a document's have lines."""
    token = _GATHERS.set(True)
    try:
        yield
    finally:
        _GATHERS.reset(token)


@dataclass(frozen=True)
class Written:
    """Where a field is not written by its name.

    Attributes:
        flag: the flag's name; by default the field's with dashes.
        noted: whether manifests note it among their options.
    """

    flag: str | None = None
    noted: bool = True


class StageOptions(Section):
    """The options of a stage. The text below a field is its help.

    Raises:
        UpcycleError: `error`, for a value that is not possible, by its flag; but see `gathered`.
    """

    error: ClassVar[type[UpcycleError]] = UpcycleError

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            options = build(value)
        except ValidationError as error:
            if _GATHERS.get():
                raise
            raise cls._refused(error.errors()[0]) from error
        if problems := "; ".join(options.contradictions()):
            if _GATHERS.get():
                raise ValueError(problems)
            raise cls.error(problems, where=cls.__name__, fix="mend what is named above")
        return options

    def contradictions(self) -> list[str]:
        """What cannot be asked for together, in words."""
        return []

    @classmethod
    def written(cls, name: str) -> Written:
        """Where a field is not written by its name."""
        found = (each for each in cls.model_fields[name].metadata if isinstance(each, Written))
        return next(found, Written())

    @classmethod
    def flag(cls, name: str) -> str:
        """The flag of a field: `--kv-heads`."""
        return f"--{cls.written(name).flag or name.replace('_', '-')}"

    @property
    def texts(self) -> list[Path]:
        """The files and folders of text that are named, but for words such as builtin."""
        fields = type(self).model_fields.items()
        named = [name for name, field in fields if PathValue in get_args(field.annotation)]
        return [
            path for name in named for path in getattr(self, name) if str(path) not in TEXT_WORDS
        ]

    def noted(self) -> dict[str, Any]:
        """What a manifest notes, as JSON values; of paths their names, for folders may move."""
        return {name: _plain(value) for name, value in self if self.written(name).noted}

    def noted_in(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """What a manifest's options tell, with the defaults of those that are younger than it."""
        required = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if field.is_required()
        }
        return {**type(self)(**required).noted(), **made}

    def words(self, names: Iterable[str]) -> list[str]:
        """The words of a command line that give these fields the values that they have here."""
        chosen, words = set(names), list[str]()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name not in chosen or value is None or value is False:
                continue
            flag = self.flag(name)
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag] if each is True else [flag, str(each)]
        return words

    @classmethod
    def _refused(cls, problem: ErrorDetails) -> UpcycleError:
        """A problem in our words."""
        where = ".".join(map(str, problem["loc"]))
        if where in cls.model_fields:
            where = cls.flag(where)
        name, given = where.removeprefix("--"), problem["input"]
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == REFUSED:
            what, fix = context["what"], context["fix"]
        elif kind == "literal_error":
            choices = context["expected"].replace("'", "")
            what, fix = f"unknown {name} {given!r}", f"choose {choices}"
        elif kind == "missing":
            what, fix = f"{name} is missing", f"give {where}"
        elif kind == "extra_forbidden":
            what, fix = f"there is no option {name}", f"choose of {', '.join(cls.model_fields)}"
        else:
            message = problem["msg"].removeprefix("Input ")
            what, fix = f"{name} cannot be {given!r}", f"it {message}"
        return cls.error(what, where=where, fix=fix)


def _plain(value: object) -> Any:
    """A value as JSON has it, without the folders of paths."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return value.name if isinstance(value, Path) else value

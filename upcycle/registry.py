"""A table of named things that third parties may extend through an entry point."""

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to values, filled by `add` and, on the first look-up, from an entry-point group.

    Args:
        kind: what the values are, for error messages.
        group: the entry-point group whose modules register more when imported.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self._group = group
        self._values: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str) -> Callable[[T], T]:
        """Register the decorated value under `name`.

        Raises:
            ValueError: the name is taken.
        """

        def register(value: T) -> T:
            if name in self._values:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._values[name] = value
            return value

        return register

    def get(self, name: str) -> T | None:
        """The value of `name`, or None."""
        self._load_entry_points()
        return self._values.get(name)

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load_entry_points()
        return sorted(self._values)

    def __iter__(self) -> Iterator[T]:
        return (self._values[name] for name in self.names())

    def _load_entry_points(self) -> None:
        if not self._loaded:
            self._loaded = True
            for point in entry_points(group=self._group):
                point.load()

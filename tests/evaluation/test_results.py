"""The layout of the comparison in report.json is documented where it is defined."""

import dataclasses
import inspect

import pytest

from upcycle.evaluation import results

CLASSES = [
    value
    for _, value in inspect.getmembers(results, inspect.isclass)
    if dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_key_has_a_line(cls: type) -> None:
    documented = inspect.getdoc(cls) or ""
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in documented

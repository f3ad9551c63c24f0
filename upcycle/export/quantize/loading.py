"""From the word after `--quantize` to a checked scheme."""

import os
from pathlib import Path

from pydantic import ValidationError

from upcycle.errors import ExportError
from upcycle.export.quantize.schemes import PRESETS, Quantization
from upcycle.recipe.problems import problems_of
from upcycle.recipe.strict_yaml import read_tree


def load_quantization(spec: str) -> Quantization:
    """A preset by its name, or a YAML file.

    Raises:
        ExportError: there is no such preset or file, or the file is wrong; every problem is named
            with its line and key.
    """
    if spec in PRESETS:
        return PRESETS[spec]
    path = Path(spec)
    if not os.path.isfile(path):
        raise ExportError(
            f"there is no quantisation {spec!r}",
            where="--quantize",
            fix=f"choose one of {', '.join(PRESETS)}, or name a YAML file",
        )
    tree = read_tree(path)
    problems = list(tree.problems)
    if not problems:
        try:
            return Quantization.model_validate(tree.value)
        except ValidationError as error:
            problems = problems_of(error, Quantization, tree.where)
    raise ExportError(
        "; ".join(map(str, problems)), where=str(path), fix="mend each key named above"
    )

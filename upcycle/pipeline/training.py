"""The `train` section of a recipe: what it goes on from, and what it is refused for.

`upcycle train` and `upcycle run` share it, and know each other's results by it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.lineage import (
    TRAIN,
    differences,
    is_of_model,
    is_vocabulary,
    not_of_origin,
    origin_of,
    other_files,
)
from upcycle.checkpoint.manifest import MANIFEST_NAME, Manifest, hash_file, read_manifest
from upcycle.checkpoint.reader import Checkpoint, resolve
from upcycle.errors import TrainingError
from upcycle.families import shape_of
from upcycle.models.comparable import check_same_tokenizer
from upcycle.models.loading import load_tokenizer
from upcycle.options.train import TrainOptions
from upcycle.pipeline.conversion import is_conversion, option_changes
from upcycle.pipeline.layout import Layout
from upcycle.progress import Watcher, ignore
from upcycle.recipe.commands import convert_command
from upcycle.recipe.schema import Recipe
from upcycle.training.facts import (
    row_facts,
    run_settings,
    setting_keys,
    text_facts,
    training_rows,
    weight_hashes,
)
from upcycle.training.team import team

if TYPE_CHECKING:
    from upcycle.training.result import TrainResult

COMMAND = ("upcycle", "train", "RECIPE")  # for what an error advises
JOIN = "train"  # the word at which all processes begin to train


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    allow_change: Collection[str] = (),
    overwrite: bool = False,
    watch: Watcher = ignore,
    tell: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = COMMAND,
) -> "TrainResult | None":
    """Uptrain the converted folder of a recipe, on all processes that were started together.

    The arguments are those of `uptrain`.

    Returns:
        What the run did; None on a process whose first one ended before it.

    Raises:
        TrainingError: the converted folder is missing, or is not what the recipe makes of its
            source; or as for `uptrain`.
        UpcycleError: as for `uptrain`.
    """
    assert recipe.train is not None
    crew, notes = team(), []
    if crew is None or crew.is_first:
        notes = check_converted(recipe)
        if crew is not None:
            crew.tell(JOIN)
    elif crew.wait() is None:
        return None
    result = start(
        recipe,
        resume=resume,
        allow_change=allow_change,
        overwrite=overwrite,
        watch=watch,
        tell=tell,
        command=command,
    )
    return replace(result, notes=(*notes, *result.notes))


def start(
    recipe: Recipe,
    *,
    resume: bool,
    overwrite: bool,
    allow_change: Collection[str] = (),
    watch: Watcher = ignore,
    tell: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = COMMAND,
) -> "TrainResult":
    """Train a recipe's converted folder, after all checks; each process calls it.

    Raises:
        UpcycleError: as for `uptrain`.
    """
    from upcycle.training.loop import uptrain

    assert recipe.train is not None
    layout = Layout(recipe.output)
    return uptrain(
        layout.converted,
        teacher_of(recipe),
        recipe.train,
        layout.uptrained,
        layout.training,
        resume=resume,
        allow_change=allow_change,
        overwrite=overwrite,
        watch=watch,
        tell=tell,
        command=command,
    )


def teacher_of(recipe: Recipe) -> Path:
    """The folder of the model to learn from: the source, unless another one is named."""
    named = None if recipe.train is None else recipe.train.teacher
    return resolve(recipe.source if named is None else named)


def check_teacher(recipe: Recipe) -> str:
    """Refuse a teacher that the recipe names and that reads other tokens than the source.

    Raises:
        CheckpointError: it is missing or damaged.
        EvaluationError: its tokenizer is not the source's.
    """
    folder = Checkpoint.open(teacher_of(recipe)).folder
    source = load_tokenizer(resolve(recipe.source))
    check_same_tokenizer(source, load_tokenizer(folder), folder)
    return str(folder)


def check_converted(recipe: Recipe) -> list[str]:
    """Refuse a converted folder that is not what the recipe makes of its source.

    Returns:
        What is not known of it, for people.

    Raises:
        TrainingError: it is missing, of another source, made by other options, or was changed.
        CheckpointError: it or its manifest is damaged, or the source is missing.
        EvaluationError: a teacher that the recipe names reads other tokens.
    """
    folder = Layout(recipe.output).converted
    if not folder.is_dir():
        raise TrainingError(
            f"there is no converted checkpoint {folder}",
            where=str(recipe.output),
            fix=f"run `{convert_command(recipe)}`, or `upcycle run` with the recipe",
        )
    source = resolve(recipe.source)
    if recipe.train is not None and recipe.train.teacher is not None:
        check_teacher(recipe)
    checkpoint, manifest = Checkpoint.open(folder), read_manifest(folder)
    _check_kv_heads(checkpoint, recipe)
    origin = origin_of(manifest)
    if manifest is None or not origin:
        note = f"{folder.name} does not say what it was made from: it is taken for a conversion of "
        return [f"{note}{recipe.source} as the recipe asks for it"]
    vocabulary = {
        path.name: hash_file(path) for path in source.iterdir() if is_vocabulary(path.name)
    }
    other = not_of_origin(origin, {**weight_hashes(Checkpoint.open(source)), **vocabulary})
    if other:
        raise TrainingError(
            f"{folder} was not made from {recipe.source}: {', '.join(other)} there is another",
            where=f"{folder / MANIFEST_NAME}, and the recipe's source",
            fix="name the source that it was made from; to learn from another model, name that "
            f"one as train.teacher; or convert again: `{convert_command(recipe, overwrite=True)}`",
        )
    _check_unchanged(checkpoint, manifest)
    if not is_conversion(manifest):
        note = f"{folder.name} was uptrained before: of the recipe's convert section only"
        return [f"{note} kv_heads is compared"]
    changes = option_changes(manifest, recipe.convert)
    if changes:
        raise TrainingError(
            f"{folder} was not made by the recipe's convert section: {'; '.join(changes)}",
            where=str(folder / MANIFEST_NAME),
            fix=f"mend the recipe, or run `{convert_command(recipe, overwrite=True)}`",
        )
    return []


def _check_kv_heads(checkpoint: Checkpoint, recipe: Recipe) -> None:
    found = shape_of(checkpoint.config).num_key_value_heads
    if found != recipe.convert.kv_heads:
        raise TrainingError(
            f"{checkpoint.folder} has {found} KV heads, and the recipe asks for "
            f"{recipe.convert.kv_heads}",
            where="recipe, convert.kv_heads",
            fix=f"mend the recipe, or run `{convert_command(recipe, overwrite=True)}`",
        )


def _check_unchanged(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Refuse weights and a configuration that are no longer what the manifest tells of."""
    changed = other_files(made_hashes(manifest), weight_hashes(checkpoint))
    if changed:
        raise TrainingError(
            f"{', '.join(changed)} was changed after {checkpoint.folder} was made",
            where=str(checkpoint.folder),
            fix=f"make the folder again, or remove its {MANIFEST_NAME} to train it as it is",
        )


def made_hashes(manifest: Manifest) -> dict[str, str]:
    """Hashes of the configuration and weights that a conversion or an uptraining wrote.

    An uptraining notes those of the weights alone.
    """
    files = manifest.result.weights if manifest.stage == TRAIN else manifest.result.files
    return {
        name: known
        for name, known in files.items()
        if is_of_model(name) and not is_vocabulary(name)
    }


def run_changes(
    facts: Mapping[str, Any],
    recipe: TrainOptions,
    *,
    converted: Path,
    student: Mapping[str, str] | None,
    teacher: Mapping[str, str],
) -> list[str]:
    """What makes a run that is asked for another than the one that left a state or a result.

    Args:
        facts: of the run that was, see `run_facts`.
        recipe: what is asked for.
        converted: the student's folder, for its tokenizer.
        student: hashes of its configuration and weights; None where it is still to be made.
        teacher: those of the teacher.
    """
    known = {key: facts[key] for key in setting_keys() if key in facts}
    changed = differences(known, run_settings(recipe))
    changed += differences({"teacher": facts.get("teacher")}, {"teacher": teacher})
    if student is None:
        return changed
    changed += differences({"student": facts.get("student")}, {"student": student})
    # Only the rows decide, but the same text makes the same ones: most runs need no tokenising.
    if not changed and facts.get("text") != text_facts(recipe, converted):
        rows, _ = training_rows(converted, recipe)
        changed += differences({"rows": facts.get("rows")}, {"rows": row_facts(rows)})
    return changed


def result_facts(manifest: Manifest) -> dict[str, Any]:
    """The facts of the run that made an uptrained folder."""
    return {**manifest.options.document, **manifest.source.document}

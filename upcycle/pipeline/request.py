"""What a run would refuse sooner or later, looked for before its first stage.

`run` stops at the first finding, `doctor` shows them all.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.class_check import check_class
from upcycle.conversion.convert import check_request
from upcycle.evaluation.held_out import read_held_out
from upcycle.export import options as export_options
from upcycle.export.coreml import SUFFIX
from upcycle.export.quantize.schemes import load_quantization
from upcycle.models.comparable import check_context
from upcycle.models.generation import prompt_tokens
from upcycle.models.loading import check_causal_lm, class_config, load_tokenizer
from upcycle.options.export import ExportRecipe
from upcycle.pipeline.layout import Layout, check_inputs
from upcycle.pipeline.training import check_teacher
from upcycle.recipe.schema import Recipe
from upcycle.training.facts import check_text
from upcycle.training.launch import check_launch
from upcycle.training.models import check_trainable


def request_checks(
    recipe: Recipe, source: Path, inputs: Iterable[Path] = (), *, strict: bool = False
) -> list[tuple[str, Callable[[], str]]]:
    """Checks by name, the cheap ones first; each returns what it saw, or raises `UpcycleError`.

    Args:
        recipe: the run.
        source: the folder of its source.
        inputs: files that the output must not touch beside those that the recipe names.
        strict: what would only be warned of fails too.
    """
    training, exported = recipe.train, recipe.export
    mine = [source, *recipe.texts, *inputs]
    if training is not None and training.teacher is not None:
        teacher = Path(training.teacher)
        mine += [teacher] if teacher.is_dir() else []  # else a Hub id, or its own check's matter
    checks = [
        ("inputs and output", lambda: _inputs(recipe, mine)),
        ("conversion", lambda: _conversion(recipe, source)),
        ("class", lambda: check_class(source, strict=strict)),
        ("language model", lambda: _language_model(source)),
        ("context", lambda: _context(recipe, source)),
    ]
    if exported is not None:
        checks.append(("export", lambda: _export(exported, recipe.output)))
    checks.append(("evaluation text", lambda: _evaluation_text(recipe, source)))
    if training is not None:
        checks.insert(0, ("launch", lambda: check_launch(training)))
        if training.teacher is not None:
            checks.append(("teacher", lambda: check_teacher(recipe)))
        checks.append(("trained weights", lambda: check_trainable(source, training.trainable)))
        checks.append(("training text", lambda: check_text(source, training)))
    return checks


def _inputs(recipe: Recipe, inputs: list[Path]) -> str:
    check_inputs(recipe.output, inputs)
    return f"{len(inputs)} inputs are there, outside {recipe.output}"


def _conversion(recipe: Recipe, source: Path) -> str:
    todo = check_request(source, **recipe.convert.model_dump())
    heads = f"{todo.source_shape.num_key_value_heads} → {todo.num_key_value_heads} KV heads"
    return "; ".join([heads, *(f"warning: {warning}" for warning in todo.warnings)])


def _language_model(source: Path) -> str:
    checkpoint = Checkpoint.open(source)
    return check_causal_lm(checkpoint.config, checkpoint.tensors, source)


def _context(recipe: Recipe, source: Path) -> str:
    """Rows, windows and prompts with their continuations fit into the source's positions."""
    config = class_config(Checkpoint.open(source).config).get_text_config()
    evaluated = recipe.evaluate
    lengths = {"evaluate.sequence_length": evaluated.sequence_length}
    if recipe.train is not None:
        lengths["train.sequence_length"] = recipe.train.sequence_length
    if recipe.export is not None:
        lengths["export.context"] = recipe.export.context
    for key, length in lengths.items():
        check_context(config, length, source, key=key)
    if evaluated.prompts:
        tokenizer = load_tokenizer(source)
        for prompt in evaluated.prompts:
            prompt_tokens(tokenizer, prompt, evaluated.new_tokens, config)
    return ", ".join(f"{key} {length}" for key, length in lengths.items())


def _export(section: ExportRecipe, output: Path) -> str:
    options = export_options.ExportOptions(**section.model_dump(exclude={"calibration"}))
    package = Layout(output, chunked=options.chunk_size is not None).package
    export_options.check_target(package, SUFFIX, options)
    if options.quantize is not None:
        load_quantization(options.quantize)
    return f"{package.name}, context {options.context}"


def _evaluation_text(recipe: Recipe, source: Path) -> str:
    section = recipe.evaluate
    tokenizer = load_tokenizer(source)
    text = read_held_out(
        section.text,
        tokenizer,
        section.sequence_length,
        section.max_tokens,
        section.max_bad_share,
    ).text
    losses = f"; not all of the text is used: {text.losses}" if text.losses else ""
    return f"{text.windows} windows, {text.tokens:,} tokens to score{losses}"

"""`upcycle eval`: source and candidates on the same held-out text."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upcycle.cli.arguments import Device, Dtype, Overwrite, Source
from upcycle.cli.comparison import print_comparison
from upcycle.cli.console import Console, Outcome, command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from upcycle.recipe.schema import Recipe

_EPILOG = "Example: upcycle eval recipes/demo-source out --out out-report --prompt 'def main('"


@command("eval", epilog=_EPILOG)
def eval_command(
    console: Console,
    source: Source,
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="OUT", help="Converted and uptrained folders; the last one is judged."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to make for the report.")],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Held-out text: .txt, .jsonl, .parquet; may be repeated."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="Take the recipe's evaluate section and training log."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Continue this with every model; may be repeated."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens to score at most.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=2, help="Tokens per window.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
) -> Outcome:
    """Compare models with their source: likelihood, KL, agreement, cache, continuations."""
    from upcycle.checkpoint.reader import resolve
    from upcycle.checkpoint.staging import check_output, staged
    from upcycle.options.evaluate import EvaluateOptions
    from upcycle.recipe.loading import load_recipe
    from upcycle.report.build import build_report
    from upcycle.report.render import HTML_NAME, write_report

    loaded = load_recipe(recipe) if recipe else None
    given = {
        "text": tuple(text) if text else None,
        "prompts": tuple(prompt) if prompt else None,
        "max_tokens": max_tokens,
        "sequence_length": sequence_length,
    }
    settings = (loaded.evaluate if loaded else EvaluateOptions()).model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    inputs = [*map(Path, (source, *candidates)), *settings.text]
    check_output(out, overwrite=overwrite, inputs=inputs)

    from upcycle.evaluation.compare import evaluate

    with console.progress() as watch:
        comparison = evaluate(
            source,
            candidates,
            text=settings.text,
            max_tokens=settings.max_tokens,
            sequence_length=settings.sequence_length,
            prompts=settings.prompts,
            new_tokens=settings.new_tokens,
            margins=settings.margins.model_dump(),
            max_bad_share=settings.max_bad_share,
            device=device,
            dtype=dtype,
            watch=watch,
        )
    document = build_report(
        comparison,
        folders={
            model.label: resolve(folder)
            for model, folder in zip(comparison.models, (source, *candidates), strict=True)
        },
        command=_command_line(source, candidates, out, device, dtype, recipe, given),
        training_log=_training_log(loaded),
    )
    with staged(out, overwrite=overwrite, inputs=inputs) as folder:
        write_report(document, folder)
    print_comparison(console, comparison, document.warnings)
    console.print(f"report   {out / HTML_NAME}")
    found = {
        "report": str(out),
        "passed": comparison.passed,
        "comparison": comparison.to_dict(),
        "warnings": document.warnings,
    }
    return Outcome(found, comparison.passed)


def _training_log(recipe: "Recipe | None") -> Path | None:
    """The log of the recipe's uptraining, where it has run."""
    from upcycle.recipe.layout import Layout
    from upcycle.training.log import LOG_NAME

    log = Layout(recipe).training / LOG_NAME if recipe else None
    return log if log and log.is_file() else None


def _command_line(
    source: str,
    candidates: list[str],
    out: Path,
    device: str,
    dtype: str,
    recipe: Path | None,
    given: "Mapping[str, Any]",
) -> str:
    """The command that makes the report again, with the options that were given."""
    words = ["upcycle", "eval", source, *candidates, "--out", str(out)]
    if recipe:
        words += ["--recipe", str(recipe)]
    words += [word for file in given["text"] or () for word in ("--text", str(file))]
    words += [word for prompt in given["prompts"] or () for word in ("--prompt", prompt)]
    for name in ("max_tokens", "sequence_length"):
        if given[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    return shlex.join([*words, "--device", device, "--dtype", dtype])

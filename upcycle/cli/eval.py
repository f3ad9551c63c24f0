"""`upcycle eval`: source and candidates on the same held-out text."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from upcycle.cli.arguments import Overwrite, Source
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.findings import print_comparison
from upcycle.options.evaluate import DEFAULTS, EvaluateOptions

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
    options: EvaluateOptions = DEFAULTS,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="Take the recipe's evaluate section and training log."),
    ] = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Compare models with their source: likelihood, KL, agreement, cache, continuations."""
    from upcycle.checkpoint.reader import resolve
    from upcycle.checkpoint.staging import check_output, staged
    from upcycle.recipe.loading import load_recipe
    from upcycle.report.build import build_report
    from upcycle.report.render import HTML_NAME, write_report

    loaded = load_recipe(recipe) if recipe else None
    given = options.model_fields_set
    if loaded:
        changes = {name: getattr(options, name) for name in given}
        options = loaded.evaluate.model_copy(update=changes)
    inputs = [*map(Path, (source, *candidates)), *options.text]
    check_output(out, overwrite=overwrite, inputs=inputs)

    from upcycle.evaluation.compare import evaluate
    from upcycle.pipeline.shared import training_log

    with console.progress() as watch:
        comparison = evaluate(source, candidates, options, watch=watch)
    again = ["upcycle", "eval", source, *candidates, "--out", str(out)]
    again += ["--recipe", str(recipe)] if recipe else []
    again += options.words({*given, "device", "dtype"})
    document = build_report(
        comparison,
        folders={
            model.label: resolve(folder)
            for model, folder in zip(comparison.models, (source, *candidates), strict=True)
        },
        command=shlex.join(again),
        training_log=training_log(loaded) if loaded else None,
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

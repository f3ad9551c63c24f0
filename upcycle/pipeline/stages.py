"""The five stages of a run: a small object each, in a file of its own.

stage     reads                                makes         is refused for            runs
--------  -----------------------------------  ------------  ------------------------  -------------
convert   the source, calibration text         converted     inputs and output,        convert
                                                             conversion, class,
                                                             language model, context
train     converted, the teacher, its text     uptrained     launch, teacher, trained  uptrain
                                                             weights, training text
evaluate  source, converted, uptrained, text   evaluation    evaluation text           evaluate
export    uptrained, else converted            model         export                    export_coreml
report    all of these, and the training log   report                                  build_report

A stage says what is asked of it (`options`), what it reads (`inputs`), what it is refused for
(`preconditions`) and how it is made (`make`). What is the same for all of them, such as when a
stage is finished, is in `stage.py`; `runner.py` runs those that are not; `records.py` knows what
the run itself made, and may therefore make again. `upcycle train` alone is in `training.py`.
"""

from upcycle.pipeline.convert_stage import Convert
from upcycle.pipeline.evaluate_stage import Evaluate
from upcycle.pipeline.export_stage import Export
from upcycle.pipeline.report_stage import Report
from upcycle.pipeline.shared import Run
from upcycle.pipeline.stage import Precondition, Stage
from upcycle.pipeline.train_stage import Train


def stages_of(run: Run) -> list[Stage]:
    """Those that the recipe asks for, in order; each reads what the ones before it made."""
    recipe, layout = run.recipe, run.layout
    rows = [
        (Convert, recipe.convert, layout.converted),
        (Train, recipe.train, layout.uptrained),
        (Evaluate, recipe.evaluate, layout.evaluation),
        (Export, recipe.export, layout.package),
        (Report, run.command, layout.report),
    ]
    return [stage(run, asked, output) for stage, asked, output in rows if asked is not None]


def preconditions(run: Run) -> list[Precondition]:
    """What a run would refuse sooner or later, the cheap ones first.

    `run` stops at the first finding, `doctor` shows them all.
    """
    found = [each for stage in stages_of(run) for each in stage.preconditions()]
    return sorted(found, key=lambda each: each.cost)

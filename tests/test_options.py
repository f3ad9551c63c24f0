"""What can be asked of a stage is written once: in its options model."""

import json
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
import typer.main
import yaml

import upcycle
from tests.pipeline_runs import TinyPipeline, call, tiny_pipeline
from upcycle.checkpoint.manifest import read_manifest
from upcycle.cli.app import app
from upcycle.cli.flags import Only, flagged, flags_of
from upcycle.errors import EvaluationError, ExportError, PlanError, TrainingError
from upcycle.evaluation.results import MARGINS
from upcycle.models.comparable import DTYPES
from upcycle.options.attention_forms import FORMS
from upcycle.options.base import Dtype
from upcycle.options.convert import ConvertOptions
from upcycle.options.evaluate import EvaluateOptions, Margins
from upcycle.options.export import ExportOptions
from upcycle.options.stage import StageOptions
from upcycle.options.train import TrainOptions
from upcycle.pipeline.convert_stage import option_changes
from upcycle.pipeline.training import advised_convert
from upcycle.recipe.loading import load_recipe
from upcycle.recipe.schema import Recipe

# Of each command, what shapes no output and is no option of the stage.
OTHERS = {"overwrite", "json_", "quiet", "debug"}
COMMANDS: dict[str, tuple[type[StageOptions], set[str]]] = {
    "convert": (ConvertOptions, {"resume"}),
    "export": (ExportOptions, set()),
    "eval": (EvaluateOptions, {"out", "recipe"}),
}
SECTIONS: dict[str, type[StageOptions]] = {
    "convert": ConvertOptions,
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "export": ExportOptions,
}
# Another value than the default for each option, as a recipe writes it.
ASKED: dict[str, dict[str, Any]] = {
    "convert": {
        "kv_heads": 2,
        "method": "first",
        "calibration": ["/a b.txt", "builtin"],
        "calibration_weights": [0.75, 0.25],
        "calibration_window": 1024,
        "refine_precision": "bf16",
        "calibration_tokens": 512,
        "refine": 3,
        "grouping": "search",
        "device": "cpu",
        "seed": 7,
        "dtype": "float16",
        "max_shard_size": "5GB",
        "allow_nonfinite": True,
        "drop_extra_attention": True,
        "sha256": True,
        "strict": True,
    },
    "evaluate": {
        "text": ["/t.txt"],
        "prompts": ["a b", "c"],
        "max_tokens": 9,
        "sequence_length": 8,
        "new_tokens": 3,
        "max_bad_share": 0.5,
        "margins": {"kl_mean": 0.5},
        "device": "cpu",
        "dtype": "bfloat16",
    },
    "export": {
        "context": 64,
        "prefill": 32,
        "attention": "repeat-kv",
        "kv_cache": "read-only",
        "conv": True,
        "split_head": 4,
        "argmax": True,
        "quantize": "mixed",
        "untie": True,
        "chunk_size": "1GB",
        "calibration": ["/c.txt"],
    },
}


def click_command(name: str) -> Any:
    """A command as the command line has it."""
    import_module(f"upcycle.cli.{name}")
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_its_model_and_no_others(name: str) -> None:
    model, others = COMMANDS[name]
    options = {p.name: p for p in click_command(name).params if p.param_type_name == "option"}
    assert options.keys() == {*flagged(model), *others, *OTHERS}
    for field in flagged(model):
        described = model.model_fields[field]
        assert options[field].opts == [model.flag(field)]
        assert options[field].required == described.is_required()
        assert " ".join((described.description or "").split()).rstrip(".") in options[field].help
        if isinstance(described.default, bool | int | float | str):
            assert options[field].default == described.default


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_of_a_recipe_is_the_model(name: str) -> None:
    assert SECTIONS[name] in (
        Recipe.model_fields[name].annotation,
        *get_args(Recipe.model_fields[name].annotation),
    )
    assert all(field.description for field in SECTIONS[name].model_fields.values())
    assert getattr(upcycle, SECTIONS[name].__name__) is SECTIONS[name]


def test_only_what_has_keys_of_its_own_has_no_flag() -> None:
    unflagged = {
        (name, field)
        for name in ASKED
        for field in {*SECTIONS[name].model_fields} - {*flagged(SECTIONS[name])}
    }
    assert unflagged == {("evaluate", "margins")}


def asked_of(section: str, folder: Path) -> StageOptions:
    """What a recipe that says `ASKED` asks for."""
    document = {"source": "s", "output": "o", "convert": {"kv_heads": 2}, section: ASKED[section]}
    (folder / "r.yaml").write_text(yaml.safe_dump(document))
    found = getattr(load_recipe(folder / "r.yaml"), section)
    assert isinstance(found, StageOptions)
    return found


@pytest.mark.parametrize(("name", "section"), [("convert", "convert"), ("export", "export")])
def test_what_a_recipe_says_its_command_says_too(name: str, section: str, tmp_path: Path) -> None:
    asked = asked_of(section, tmp_path)
    fields = type(asked).model_fields
    assert {f for f in fields if getattr(asked, f) != fields[f].default} == {*fields}
    arguments = ["SRC", "OUT", *asked.words(fields)]
    assert taken(name, type(asked), arguments) == asked


def test_what_an_evaluate_section_says_the_command_says_too(tmp_path: Path) -> None:
    asked = asked_of("evaluate", tmp_path)
    fields = EvaluateOptions.model_fields
    assert {f for f in fields if getattr(asked, f) != fields[f].default} == {*fields}
    words = asked.words(flagged(EvaluateOptions))
    found = taken("eval", EvaluateOptions, ["SRC", "OUT", "--out", "o", *words])
    assert found == asked.model_copy(update={"margins": Margins()})
    assert found.model_fields_set == {*fields} - {"margins"}


def taken(name: str, model: type[StageOptions], arguments: list[str]) -> StageOptions:
    """The options that a command makes of its arguments."""
    context = click_command(name).make_context(name, arguments)
    flags = flags_of(Parameter("options", Parameter.KEYWORD_ONLY, annotation=model))
    assert flags is not None
    assert flags.names == tuple(flagged(model))
    return flags.take(context, dict(context.params))


def test_the_advised_command_says_every_option(tmp_path: Path) -> None:
    document = {"source": "s", "output": "o", "convert": ASKED["convert"]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(document))
    command = advised_convert(load_recipe(tmp_path / "r.yaml"))
    assert all(ConvertOptions.flag(name) in command for name in ASKED["convert"])
    assert "--max-shard-size 5000000000" in command


def test_choices_are_what_the_stages_know() -> None:
    assert get_args(ExportOptions.model_fields["attention"].annotation) == tuple(FORMS)
    assert set(get_args(Dtype)) == DTYPES.keys()
    assert Margins.model_fields.keys() == MARGINS.keys()


@pytest.mark.parametrize(
    ("model", "values", "error", "lines"),
    [
        (
            ConvertOptions,
            {"kv_heads": 2, "refine": -1},
            PlanError,
            ("refine cannot be -1", "--refine", "it should be greater than or equal to 0"),
        ),
        (
            ConvertOptions,
            {"kv_heads": 2, "grouping": "by age"},
            PlanError,
            ("unknown grouping 'by age'", "--grouping", "choose contiguous or search"),
        ),
        (
            ConvertOptions,
            {"kv_heads": 2, "max_shard_size": "much"},
            PlanError,
            ("'much' is not a memory size", "--max-shard-size", "write it as 80GiB"),
        ),
        (ConvertOptions, {}, PlanError, ("kv-heads is missing", "--kv-heads", "give --kv-heads")),
        (
            ConvertOptions,
            {"kv_heads": 2, "sed": 1},
            PlanError,
            ("there is no option sed", "sed", "choose of kv_heads, method"),
        ),
        (
            ExportOptions,
            {"context": 32, "prefill": 32},
            ExportError,
            ("prefill 32 is not between 2 and the context of 32", "--prefill", "pass 16, or"),
        ),
        (
            ExportOptions,
            {"split_head": 65},
            ExportError,
            ("the output head cannot have 65 parts", "--split-head", "pass 8, at most 64"),
        ),
        (
            EvaluateOptions,
            {"margins": {"kl_mean": -1.0}},
            EvaluationError,
            ("margins.kl_mean cannot be -1.0", "margins.kl_mean", "it should be greater than"),
        ),
        (
            TrainOptions,
            {
                "data": {"sources": [{"path": "a"}]},
                "sequence_length": 8,
                "batch_size": 3,
                "micro_batch_size": 2,
                "steps": 1,
                "learning_rate": 1.0,
            },
            TrainingError,
            ("batch_size (3) must be a multiple", "TrainOptions", "mend what is named above"),
        ),
    ],
    ids=str,
)
def test_a_value_that_is_not_possible_is_refused_in_three_lines(
    model: type[StageOptions],
    values: dict[str, Any],
    error: type[Exception],
    lines: tuple[str, str, str],
) -> None:
    with pytest.raises(error) as caught:
        model(**values)
    what, where, fix = str(caught.value).splitlines()
    assert what.startswith(lines[0])
    assert where == f"  where: {lines[1]}"
    assert fix.startswith(f"  fix: {lines[2]}")


@pytest.mark.parametrize(
    ("command", "option", "value", "what"),
    [
        ("convert", "--grouping", "by age", "unknown grouping 'by age'"),
        ("convert", "--max-shard-size", "much", "'much' is not a memory size"),
        ("export", "--kv-cache", "paged", "unknown kv-cache 'paged'"),
        ("export", "--context", "40", "context 40 is not a positive multiple of 32"),
        ("eval", "--dtype", "int8", "unknown dtype 'int8'"),
    ],
)
def test_a_command_names_the_flag(command: str, option: str, value: str, what: str) -> None:
    words = {"convert": ["--kv-heads", "2"], "eval": ["--out", "x"]}.get(command, [])
    done = call(command, "none", "out", *words, option, value)
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert lines[:2] == [f"error: {what}", f"  where: {option}"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("convert.grouping", "by age", "should be 'contiguous' or 'search', not 'by age'"),
        ("convert.max_shard_size", "much", "'much' is not a memory size; write it as 80GiB"),
        ("convert.strict", "3", "should be a valid boolean, not 3"),
        ("evaluate.dtype", "int8", "should be 'float32', 'bfloat16' or 'float16', not 'int8'"),
        ("export.context", "40", "context 40 is not a positive multiple of 32; pass 32"),
    ],
)
def test_a_recipe_names_the_key(tiny: TinyPipeline, key: str, value: str, what: str) -> None:
    section, _, name = key.partition(".")
    document = yaml.safe_load(tiny.recipe.read_text())
    document.setdefault(section, {})[name] = yaml.safe_load(value)
    tiny.recipe.write_text(yaml.safe_dump(document))
    done = call("run", tiny.recipe)
    assert done.exit_code == 2
    first, where, _ = done.stderr.splitlines()
    assert first.startswith(f"error: {what}")
    assert where.startswith("  where: recipe.yaml:")
    assert where.endswith(f": {key}")


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPipeline:
    tiny = tiny_pipeline(tmp_path)
    document = yaml.safe_load(tiny.recipe.read_text())
    del document["train"]
    tiny.recipe.write_text(yaml.safe_dump(document))
    return tiny


def skipped(tiny: TinyPipeline, *overrides: str) -> list[str]:
    """The stages that a run finds finished."""
    done = call("run", tiny.recipe, *overrides, "--json")
    assert done.exit_code == 0, done.stderr
    found: list[str] = json.loads(done.stdout)["skipped"]
    return found


def test_a_run_honours_what_only_flags_could_say(tiny: TinyPipeline) -> None:
    asked = ["convert.max_shard_size=60KB", "convert.sha256=true", "evaluate.dtype=bfloat16"]
    assert skipped(tiny, *asked) == []
    converted = read_manifest(tiny.out / "converted")
    evaluated = read_manifest(tiny.out / "evaluation")
    assert converted is not None
    assert evaluated is not None
    assert converted.options.document["max_shard_size"] == 60_000
    assert len(list((tiny.out / "converted").glob("*.safetensors"))) > 1
    assert converted.source.document["sha256"].keys() == {"model.safetensors"}
    assert evaluated.options.document["dtype"] == "bfloat16"
    comparison = json.loads((tiny.out / "evaluation" / "comparison.json").read_text())
    assert comparison["settings"]["dtype"] == "bfloat16"
    for free in ("convert.sha256=false", "convert.device=cpu", "evaluate.device=cpu"):
        assert skipped(tiny, *asked, free)[:2] == ["convert", "evaluate"], free
    assert skipped(tiny, *asked[:2]) == ["convert"]
    assert skipped(tiny, "convert.max_shard_size=70KB") == []


@pytest.mark.parametrize(
    ("override", "check", "what"),
    [
        ("convert.dtype=float16", "conversion", "cannot store llama as float16"),
        ("convert.device=abacus", "conversion", "device 'abacus' is not available"),
        ("convert.max_shard_size=0", "conversion", "cannot hold"),
        ("evaluate.device=abacus", "evaluation text", "device 'abacus' is not available"),
    ],
)
def test_doctor_and_run_refuse_them_before_anything_is_made(
    tiny: TinyPipeline, override: str, check: str, what: str
) -> None:
    found = json.loads(call("doctor", tiny.recipe, override, "--json").stdout)["checks"]
    failed = {each["name"]: each["detail"] for each in found if not each["passed"]}
    assert what in failed[check]
    assert what in call("run", tiny.recipe, override).stderr
    assert not tiny.out.exists()


def test_manifests_note_the_options_that_shape_the_result(tiny: TinyPipeline) -> None:
    assert skipped(tiny) == []
    for folder, model in (("converted", ConvertOptions), ("evaluation", EvaluateOptions)):
        manifest = read_manifest(tiny.out / folder)
        assert manifest is not None
        noted = {name for name in model.model_fields if model.written(name).noted}
        assert manifest.options.document.keys() == noted


def test_a_manifest_without_a_younger_option_was_made_with_its_default(tiny: TinyPipeline) -> None:
    assert skipped(tiny) == []
    path = tiny.out / "evaluation" / "upcycle.json"
    manifest = json.loads(path.read_text())
    del manifest["options"]["dtype"]
    path.write_text(json.dumps(manifest))
    assert skipped(tiny) == ["convert", "evaluate"]  # and the report, which has its manifest's hash
    converted = read_manifest(tiny.out / "converted")
    assert converted is not None
    del converted.options.document["drop_extra_attention"]
    assert option_changes(converted, ConvertOptions(kv_heads=2)) == []
    other = ConvertOptions(kv_heads=2, drop_extra_attention=True)
    assert option_changes(converted, other) == ["drop_extra_attention was False and is True"]


def test_a_parameter_may_stand_for_some_fields_with_other_defaults() -> None:
    some = Annotated[EvaluateOptions, Only(("max_tokens", "dtype"))]
    default = EvaluateOptions(max_tokens=7)
    flags = flags_of(Parameter("o", Parameter.KEYWORD_ONLY, annotation=some, default=default))
    assert flags is not None
    assert [(p.name, p.default) for p in flags.parameters()] == [
        ("max_tokens", 7),
        ("dtype", "float32"),
    ]
    plain = Parameter("o", Parameter.KEYWORD_ONLY, annotation=int)
    assert flags_of(plain) is None

"""What accelerate's settings ask for is in force, or refused with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stops import ROOT
from tests.training.runs import TinyRun, tiny_run
from tests.training.test_several_processes import recipe_file
from upcycle.errors import TrainingError
from upcycle.training.launch import check_launch

# As `accelerate launch` sets them where nothing is asked for.
PLAIN = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
}
# As `torchrun` sets them.
TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("launch"))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "training under FSDP is not supported"),
        ({"ACCELERATE_USE_FSDP": "1"}, "training under FSDP is not supported"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "under DeepSpeed"),
        ({"ACCELERATE_USE_DEEPSPEED": "True"}, "under DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "under Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "a parallelism_config"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed precision fp16 is asked for there, and"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed precision fp8"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "and fp32 by the recipe"),
        ({"ACCELERATE_FP8_BACKEND": "TE"}, "training in fp8"),
        ({"ACCELERATE_USE_IPEX": "true"}, "Intel's extension for PyTorch (IPEX) is not supported"),
        ({"ACCELERATE_USE_TPU": "true"}, "training with a TPU is not supported"),
        ({"ACCELERATE_USE_SAGEMAKER": "true"}, "SageMaker's own distribution"),
        ({"XLA_USE_BF16": "1"}, "a TPU's bfloat16"),
        ({"XLA_DOWNCAST_BF16": "1"}, "a TPU's bfloat16"),
        ({"ACCELERATE_DOWNCAST_BF16": "true"}, "a TPU's bfloat16"),
        ({"PJRT_DEVICE": "TPU"}, "training with a TPU is not supported"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "a compiled model is not supported"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "over 4 micro-batches there, and over 2"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "clipped to 0.5 there, and to 1.0"),
        ({"MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}, "several processes on the CPU"),
        ({"WORLD_SIZE": "2"}, "'2' processes without a valid RANK, MASTER_PORT, MASTER_ADDR"),
        ({**TWO, "MASTER_PORT": "x"}, "without a valid MASTER_PORT"),
        ({"WORLD_SIZE": "many"}, "asks for 'many' processes"),
        ({"WORLD_SIZE": "0"}, "asks for '0' processes"),
    ],
)
def test_what_is_not_in_force_is_refused(run: TinyRun, asked: dict[str, str], what: str) -> None:
    with pytest.raises(TrainingError) as refused:
        check_launch(run.recipe(), {**PLAIN, **asked})
    assert what in refused.value.what
    name, value = next(iter(asked.items()))
    assert refused.value.where == f"{name}={value}"


@pytest.mark.parametrize(
    ("asked", "precision"),
    [
        ({}, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "fp32"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", **TWO}, "fp32"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, "fp32"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "fp32"),
        ({"ACCELERATE_USE_IPEX": "false", "ACCELERATE_USE_TPU": "false"}, "fp32"),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}, "fp32"),
        (TWO, "fp32"),
    ],
)
def test_what_is_in_force_passes(run: TinyRun, asked: dict[str, str], precision: str) -> None:
    check_launch(run.recipe(precision=precision), {**PLAIN, **asked})


def test_a_scheduler_that_names_a_master_is_no_launcher(run: TinyRun) -> None:
    check_launch(run.recipe(), {"MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"})


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_the_commands_refuse_before_anything(tmp_path: Path, command: str, name: str) -> None:
    recipe = recipe_file(tiny_run(tmp_path), "run")
    if command == "run":
        (tmp_path / "run" / "converted").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "upcycle", command, str(recipe)],
        env={**os.environ, "PYTHONPATH": str(ROOT), name: "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: training under ")
    assert f"where: {name}=true" in done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"converted"}

"""What `accelerate launch` and its configuration ask for: in force here, or refused.

accelerate hands its settings to the processes in environment variables, and reads several of them
only on some devices. Nothing that was asked for may be ignored in silence.
"""

import os
from collections.abc import Mapping

from upcycle.errors import TrainingError
from upcycle.options.train import TrainOptions
from upcycle.training.team import missing_address, world_size

_YES = {"1", "true", "yes", "y", "t", "on"}
_NOTHING = {"", "no", "none", "auto", "false", "0"}
_PLAIN = "start plain data parallelism with `torchrun --nproc-per-node N -m upcycle train RECIPE`"
# Each needs states and results that are put together from parts, which `state.py` does not have.
_SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
# Devices and ways of computing on them that the training does not know.
_DEVICES = {
    "ACCELERATE_USE_IPEX": "Intel's extension for PyTorch (IPEX)",
    "ACCELERATE_USE_TPU": "a TPU",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker's own distribution",
    "XLA_USE_BF16": "a TPU's bfloat16",
    "XLA_DOWNCAST_BF16": "a TPU's bfloat16",
    "ACCELERATE_DOWNCAST_BF16": "a TPU's bfloat16",
    "PJRT_DEVICE": "a TPU",
}


def check_launch(recipe: TrainOptions, environment: Mapping[str, str] = os.environ) -> str:
    """Refuse what is asked for and would not be done.

    Returns:
        How the processes were started, for people.

    Raises:
        TrainingError: naming the variable and its value.
    """

    def value(name: str) -> str:
        return environment.get(name, "").strip().lower()

    def refuse(what: str, name: str, fix: str) -> TrainingError:
        return TrainingError(what, where=f"{name}={environment[name]}", fix=fix)

    for name, what in _SHARDED.items():
        if value(name) in _YES:
            raise refuse(
                f"training under {what} is not supported: the weights and their moments are whole "
                "on every device",
                name,
                f"turn it off in the accelerate configuration, or {_PLAIN}",
            )
    for name, what in _DEVICES.items():
        if value(name) in {*_YES, "tpu"}:
            raise refuse(
                f"training with {what} is not supported",
                name,
                f"train on the CPU, CUDA or MPS: unset it, or {_PLAIN}",
            )
    # `accelerate launch` says "no" where nothing was asked for, so that "no" asks for nothing.
    precision = value("ACCELERATE_MIXED_PRECISION")
    if precision not in {*_NOTHING, recipe.precision}:
        raise refuse(
            f"mixed precision {precision} is asked for there, and {recipe.precision} by the recipe",
            "ACCELERATE_MIXED_PRECISION",
            "set mixed_precision: no, and train.precision to bf16 or fp32",
        )
    if value("ACCELERATE_FP8_BACKEND") not in _NOTHING:
        raise refuse(
            "training in fp8 is not supported", "ACCELERATE_FP8_BACKEND", "set mixed_precision: no"
        )
    if value("ACCELERATE_DYNAMO_BACKEND") not in _NOTHING:
        raise refuse(
            "a compiled model is not supported: a resumed run would not end in the same weights",
            "ACCELERATE_DYNAMO_BACKEND",
            "set dynamo_backend: no",
        )
    world = world_size(environment)
    missing = missing_address(environment) if world > 1 else []
    if missing or value("WORLD_SIZE") not in ("", f"{world}"):
        broken = f" without a valid {', '.join(missing)}" if missing else ""
        raise refuse(
            f"WORLD_SIZE asks for {environment['WORLD_SIZE']!r} processes{broken}",
            "WORLD_SIZE",
            "unset it to train in one process; for several, "
            "`torchrun --nproc-per-node N -m upcycle train RECIPE` sets all that they need",
        )
    accumulated = value("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    own = recipe.batch_size / (recipe.micro_batch_size * world)
    if accumulated not in _NOTHING and accumulated != f"{own:g}":
        raise refuse(
            f"gradients are accumulated over {accumulated} micro-batches there, and over {own:g} "
            f"by the recipe: batch_size {recipe.batch_size} on {world} x "
            f"{recipe.micro_batch_size} rows",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "remove gradient_accumulation_steps: batch_size and micro_batch_size say it",
        )
    clipped = value("ACCELERATE_GRADIENT_CLIPPING")
    if clipped not in _NOTHING and clipped != f"{recipe.max_grad_norm}":
        raise refuse(
            f"gradients are clipped to {clipped} there, and to {recipe.max_grad_norm} by the "
            "recipe",
            "ACCELERATE_GRADIENT_CLIPPING",
            f"remove gradient_clipping, or set train.max_grad_norm={clipped}",
        )
    # `accelerate launch --cpu --num_processes 2` starts one process, with the address of others.
    is_alone = not any(value(name) for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    by_accelerate = value("ACCELERATE_DYNAMO_BACKEND") and value("MASTER_PORT")
    if value("ACCELERATE_USE_CPU") in _YES and by_accelerate and is_alone:
        raise refuse(
            "accelerate was asked for several processes on the CPU, and started one",
            "MASTER_PORT",
            "start them with `torchrun --nproc-per-node N -m upcycle train RECIPE`, or ask for one",
        )
    return f"{world} process{'es' if world > 1 else ''}, in {recipe.precision}"

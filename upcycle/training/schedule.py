"""The learning rate as a pure function of the step, so that resuming has nothing to restore."""

import math

from upcycle.options.train import TrainOptions

# The last fifth of a warm-up-stable-decay run cools down by 1 - sqrt(progress)
# (Hägele et al. 2024, arXiv:2405.18392, section 4).
_COOLDOWN_SHARE = 0.2


def learning_rate(step: int, recipe: TrainOptions) -> float:
    """The rate of optimiser step `step`, counted from 0.

    It rises linearly to the peak during the warm-up and reaches zero one step after the last,
    except for "constant".
    """
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    after_warmup = recipe.num_steps - recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / after_warmup if after_warmup else 0.0
    return recipe.learning_rate * _shape(recipe.schedule, progress)


def _shape(schedule: str, progress: float) -> float:
    """The share of the peak at `progress` in [0, 1) after the warm-up."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return 1 - progress
    if schedule == "wsd":
        cooldown = (progress - (1 - _COOLDOWN_SHARE)) / _COOLDOWN_SHARE
        return 1.0 if cooldown <= 0 else 1 - math.sqrt(cooldown)
    assert schedule == "constant", schedule
    return 1.0

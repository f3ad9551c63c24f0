"""Packed documents see each other (huggingface/transformers PR #31629, huggingface/trl PR #3526).

transformers isolates them by their positions, but only without a mask and without a cache: with an
all-ones mask the second document attends to the first, silently.
"""

from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, tiny_model
from upcycle.errors import TrainingError
from upcycle.training.models import check_isolation, packing_leak

# Classes whose other layers, masks or sinks pay no heed to positions.
LEAKING = {
    "afmoe", "falcon_h1", "gpt_oss", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe",
    "qwen3_next",
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - LEAKING))
def test_packed_documents_give_the_logits_of_separate_ones(model_type: str) -> None:
    model = tiny_model(model_type)
    first, second = torch.arange(1, 9)[None], torch.arange(50, 70)[None]
    positions = torch.cat([torch.arange(8), torch.arange(20)])[None]
    with torch.no_grad():
        packed = model(
            input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False
        ).logits
        apart = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)
    assert packing_leak(model) < 1e-4
    check_isolation(model)


@pytest.mark.parametrize("model_type", sorted(LEAKING))
def test_a_class_that_leaks_is_refused(model_type: str) -> None:
    with pytest.raises(TrainingError, match="packed documents see each other"):
        check_isolation(tiny_model(model_type))


def test_a_leak_is_found() -> None:
    model = tiny_model()
    forward = model.forward

    def with_mask(**arguments: Any) -> Any:
        mask = torch.ones_like(arguments["input_ids"])
        return forward(**arguments, attention_mask=mask)

    model.forward = with_mask
    assert packing_leak(model) > 0.01
    with pytest.raises(TrainingError, match="packed documents see each other"):
        check_isolation(model)

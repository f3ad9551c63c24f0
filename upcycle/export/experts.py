"""Mixture-of-experts layers as a fixed graph.

transformers picks the rows of each expert at run time, which no static program can. Here all
experts run on all tokens, and the router's weights, zero where an expert was not chosen, sum them.
"""

from typing import Any

import torch
from torch import Tensor

from upcycle.errors import ExportError

DENSE = "dense"


def dense_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of the chosen experts, for transformers' `ExpertsInterface`.

    Args:
        module: the experts, their weights stacked on axis 0.
        hidden_states: [N, D], a row per token.
        top_k_index: [N, k], the experts that the router chose.
        top_k_weights: [N, k], their weights.

    Returns:
        [N, D].
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _batched_linear(module, name, hidden_states[None])  # [E, N, ..]
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = _batched_linear(module, "down_proj", inner)  # [E, N, D]
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    experts = torch.arange(outputs.shape[0])[:, None, None]
    chosen = (top_k_index[None] == experts).to(top_k_weights.dtype)  # [E, N, k]
    weights = (chosen * top_k_weights[None]).sum(-1, keepdim=True)
    return (outputs * weights).sum(0)


def _batched_linear(module: Any, name: str, x: Tensor) -> Tensor:
    weight = getattr(module, name)
    if module.is_transposed:
        output = torch.matmul(x, weight)
    else:  # this way round the weight stays a constant of its own name, which can be compressed
        output = torch.matmul(weight, x.transpose(1, 2)).transpose(1, 2)
    return output + getattr(module, f"{name}_bias")[:, None] if module.has_bias else output


def use_dense_experts(model: Any) -> None:
    """Make every mixture-of-experts layer of a model of transformers run all its experts.

    Raises:
        ExportError: a layer's experts do not go through transformers' interface.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and not hasattr(module, "has_gate"):
            raise ExportError(
                f"{type(module).__name__} picks its experts in a way of its own",
                where=name,
                fix="export a dense model, or one such as Mixtral, OLMoE or Qwen3-MoE",
            )
    ALL_EXPERTS_FUNCTIONS.register(DENSE, dense_experts)
    model.set_experts_implementation(DENSE)

"""Packages with planted faults, converted from small torch modules as anyone would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.export.quiet import quiet_coremltools, quiet_tracing
from upcycle.program.graph import Graph
from upcycle.program.lints.package import lint_graph
from upcycle.program.reading import read_graph

GROUPS, HEADS, CONTEXT, HEAD_DIM = 2, 8, 64, 32
CACHE = (1, GROUPS, CONTEXT, HEAD_DIM)


def plant(
    folder: Path,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, Any] | None = None,
    precision: str = "FLOAT16",
) -> Graph:
    """Convert a module, its buffers as states, and read the graph of the saved package.

    Args:
        folder: where `planted.mlpackage` is saved.
        module: its inputs and outputs are fp32 here and fp16 in the package.
        inputs: an example of each input, by name.
        shapes: of coremltools, for inputs of flexible shape.
        precision: of the computation, as coremltools calls it.
    """
    with quiet_tracing(), torch.no_grad():
        traced = torch.jit.trace(module.eval(), tuple(inputs.values()), check_trace=False)  # type: ignore[no-untyped-call]
    with quiet_coremltools():
        import coremltools as ct
        import numpy as np

        model = ct.convert(
            traced,
            inputs=[
                ct.TensorType(
                    name,
                    (shapes or {}).get(name, tuple(example.shape)),
                    dtype=np.int32 if example.dtype == torch.int32 else np.float16,
                )
                for name, example in inputs.items()
            ],
            states=[
                ct.StateType(ct.TensorType(shape=tuple(buffer.shape), dtype=np.float16), name=name)
                for name, buffer in module.named_buffers()
            ],
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=getattr(ct.precision, precision),
            skip_model_load=True,
        )
        model.save(str(folder / "planted.mlpackage"))
    return read_graph(folder / "planted.mlpackage")


class Attention(nn.Module):
    """Grouped attention as people write it: a linear K and Q, V = 3·K, K and V repeated to H heads.

    Args:
        caches: shapes of the buffers `cache0`, `cache1`, … that become states.
    """

    def __init__(self, *caches: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(caches):
            self.register_buffer(f"cache{index}", torch.zeros(*shape))
        self.k = nn.Linear(64, GROUPS * HEAD_DIM, bias=False)
        self.q = nn.Linear(64, HEADS * HEAD_DIM, bias=False)

    def keys(self, x: Tensor) -> Tensor:
        """New keys [1, g, T, d]."""
        return self.k(x).reshape(1, -1, GROUPS, HEAD_DIM).transpose(1, 2)

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of x [1, T, 64] over keys and values of g or H heads."""
        q = self.q(x).reshape(1, -1, HEADS, HEAD_DIM).transpose(1, 2)
        scores = q @ repeat_kv(k).transpose(2, 3)
        return torch.softmax(scores if mask is None else scores + mask, -1) @ repeat_kv(v)


class SliceWrite(Attention):
    """Writes its two caches the right way, by slice assignment."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        new = slice(position[0], position[0] + x.shape[1])
        self.cache0[:, :, new] = self.keys(x)
        self.cache1[:, :, new] = self.keys(x) * 3
        return self.attend(x, self.cache0, self.cache1)


def repeat_kv(x: Tensor) -> Tensor:
    """transformers' `repeat_kv`: [1, g, C, d] to [1, H, C, d]."""
    if x.shape[1] == HEADS:
        return x
    repeated = x[:, :, None].expand(-1, -1, HEADS // x.shape[1], -1, -1)
    return repeated.reshape(1, HEADS, x.shape[2], x.shape[3])


def hidden(tokens: int = 1) -> Tensor:
    """Hidden states [1, T, 64]."""
    return torch.ones(1, tokens, 64)


def position() -> Tensor:
    """The position [1] of the first new token."""
    return torch.zeros(1, dtype=torch.int32)


def rules(graph: Graph, *, without: str = "note") -> set[str]:
    """Names of the rules that a graph breaks, but for those of one severity."""
    return {found.lint for found in lint_graph(graph) if found.severity != without}

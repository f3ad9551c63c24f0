"""A decoder as a Core AI program, through `torch.export`."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.errors import ExportError
from upcycle.program.signature import Decoder

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def require_coreai() -> None:
    """Refuse to go on without Apple's packages.

    Raises:
        ExportError: they are not installed.
    """
    missing = [name for name in ("coreai", "coreai_torch") if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"Core AI needs {' and '.join(missing)}, which cannot be imported",
            where="installed packages",
            fix='pip install "upcycle[coreai]", on macOS or x86-64 Linux with glibc 2.34 or newer',
        )


def convert_program(
    decoder: Decoder,
    functions: Mapping[str, int],
    dtype: str,
    watch: Callable[[str], None] = lambda note: None,
) -> Any:
    """The `AIProgram` of a decoder. Nothing is printed.

    Args:
        decoder: an `nn.Module` with a signature; its weights are converted in place.
        functions: how many queries each function takes per call, by name. All share their weights.
        dtype: of the weights, the cache and the masks, one of `DTYPES`.
        watch: told of each step.
    """
    assert isinstance(decoder, nn.Module)
    decoder.to(DTYPES[dtype])
    with _quiet():
        from coreai_torch import TorchConverter

        # The other mode stores the paths and lines of this machine's sources.
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        for name, queries in functions.items():
            watch(f"exporting {name}")
            signature = decoder.signature(queries)
            converter.add_exported_program(
                _exported(decoder, decoder.example_inputs(queries), DTYPES[dtype]),
                entrypoint_name=name,
                input_names=[each.name for each in signature.inputs],
                output_names=list(signature.outputs),
                state_names=list(signature.states),
            )
        watch("converting")
        return converter.to_coreai()


def _exported(decoder: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    from coreai_torch import get_decomp_table
    from transformers.modeling_utils import local_torch_dtype

    cast = tuple(value.to(dtype) if value.is_floating_point() else value for value in inputs)
    # Constants that a model makes while it runs, such as masks, get the dtype of its weights.
    with torch.no_grad(), local_torch_dtype(dtype):
        return torch.export.export(decoder, cast).run_decompositions(get_decomp_table())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without coreai-torch's banner, which it prints to stdout, and what it and torch warn of."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield

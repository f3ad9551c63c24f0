"""What no target of an export can do, and what each of its functions takes."""

from collections.abc import Mapping
from pathlib import Path

from upcycle.errors import ExportError
from upcycle.options.export import ExportOptions
from upcycle.program.signature import DECODE, PREFILL


def functions_of(options: ExportOptions) -> Mapping[str, int]:
    """How many tokens each function takes per call, by its name."""
    return {DECODE: 1} | ({} if options.prefill is None else {PREFILL: options.prefill})


def check_target(output: Path, suffix: str, options: ExportOptions) -> None:
    """Refuse what no target can do.

    Args:
        output: what to make.
        suffix: of the names of what the target makes; chunks go into a folder.
        options: what is asked of it.

    Raises:
        ExportError: the output has another suffix, or options contradict each other.
    """
    # What begins with a dot is hidden, or no name of its own.
    stem = "model" if output.name.startswith(".") or not output.name else output.stem
    if options.chunk_size is not None and output.suffix == suffix:
        raise ExportError(
            f"chunks go into a folder, and {output.name} is named like one {suffix}",
            where=str(output),
            fix=f"name it {stem}, or omit --chunk-size",
        )
    if options.chunk_size is None and output.suffix != suffix:
        nameless = output.name in ("", "..", suffix)
        raise ExportError(
            f"{output} names no package" if nameless else f"{output.name} does not end in {suffix}",
            where=str(output),
            fix=f"name it {stem}{suffix}",
        )
    if options.untie and options.quantize is None:
        raise ExportError(
            "there is nothing to untie in fp16",
            where="--untie",
            fix="pass --quantize too, or omit --untie",
        )

"""Memory of this machine, and what was freed of it given back to the system."""

import ctypes
import os
import sys
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")


def give_back_memory() -> None:
    """Have the C library return what it keeps of freed memory.

    glibc reuses little of the aligned blocks of tens of MiB that torch allocates: layer after
    layer it would grow by the size of the attention.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
        if trim is not None:
            trim(0)


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: str) -> int:
    """Bytes that can still be allocated.

    Args:
        device: "cuda" for its own; all others share the machine's, or their container's.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or none with a limit
        return free
    return min(free, limit - used)

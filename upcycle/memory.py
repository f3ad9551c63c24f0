"""Memory of this machine, and what was freed of it given back to the system."""

import ctypes
import os
import sys


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

"""Find NaN and infinity in stored tensors by their bits, without decoding them."""

from dataclasses import dataclass

import numpy as np

from upcycle.checkpoint.reader import Checkpoint

# Per dtype: the integer of its width, the bits to flip and those to keep, and the least value of
# the result that is no finite number. Dtypes that are not listed have finite values only.
_BITS: dict[str, tuple[str, int, int, int]] = {
    "F8_E5M2": ("u1", 0, 0x7F, 0x7C),
    "F8_E4M3": ("u1", 0, 0x7F, 0x7F),
    "F8_E8M0": ("u1", 0, 0xFF, 0xFF),
    "F8_E4M3FNUZ": ("u1", 0x7F, 0xFF, 0xFF),  # the only NaN is what would be minus zero
    "F8_E5M2FNUZ": ("u1", 0x7F, 0xFF, 0xFF),
    "F16": ("<u2", 0, 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0, 0x7FFF, 0x7F80),
    "F32": ("<u4", 0, 0x7FFFFFFF, 0x7F800000),
    "F64": ("<u8", 0, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "C64": ("<u4", 0, 0x7FFFFFFF, 0x7F800000),
}


@dataclass
class NonfiniteScan:
    """Counts the values of one tensor that are NaN or infinite, chunk by chunk.

    Attributes:
        dtype: the tensor's safetensors dtype.
        count: how many were seen; a complex number counts by its parts.
        first: flat position of the first one, or None.
    """

    dtype: str
    count: int = 0
    first: int | None = None
    _seen: int = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Look at the next bytes of the tensor, a whole number of its values."""
        if self.dtype not in _BITS:
            return
        unsigned, flipped, kept, least = _BITS[self.dtype]
        bits = np.frombuffer(chunk, unsigned) ^ np.array(flipped, unsigned)
        bits &= np.array(kept, unsigned)
        if bits.size and bits.max() >= least:
            positions = np.flatnonzero(bits >= least)
            self.count += positions.size
            if self.first is None:
                self.first = self._seen + int(positions[0])
        self._seen += bits.size


def count_nonfinite(checkpoint: Checkpoint, name: str) -> int:
    """How many values of a stored tensor are NaN or infinite; streamed, never decoded."""
    scan = NonfiniteScan(checkpoint.tensors[name].dtype)
    for chunk in checkpoint.chunks(name):
        scan.update(chunk)
    return scan.count

"""Palettes: one-dimensional k-means over the numbers that fp16 has.

Every weight is one of 65,536 fp16 numbers, so clusters are found among those that occur, weighted
by how often. It is deterministic, and much faster than k-means over the weights themselves.
"""

import numpy as np
from numpy.typing import NDArray

_ITERATIONS = 100
_BINS = 64  # finer ones follow the noise of small groups


def fit_palette(
    weights: NDArray[np.float16], bits: int
) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """The table of 2^bits values with the least squared error, and each weight's index into it.

    A local optimum of Lloyd (1982), from the quantiles of the cube root of the density, which is
    the optimum for many values (Panter & Dite 1951).

    Args:
        weights: finite, of any shape.
        bits: 1 to 8.

    Returns:
        The table [2^bits], ascending, and flat indices.
    """
    keys = np.ascontiguousarray(weights).view(np.uint16).ravel()
    present, where, counts = np.unique(keys, return_inverse=True, return_counts=True)
    values = present.view(np.float16).astype(np.float64)
    order = np.argsort(values, kind="stable")
    centres = _centres(values[order], counts[order].astype(np.float64), 1 << bits)
    table = np.sort(centres).astype(np.float16)
    bounds = table.astype(np.float64)
    nearest = np.searchsorted((bounds[1:] + bounds[:-1]) / 2, values).astype(np.uint8)
    return table, nearest[where]


def _centres(
    values: NDArray[np.float64], counts: NDArray[np.float64], number: int
) -> NDArray[np.float64]:
    if len(values) <= number:
        return np.pad(values, (0, number - len(values)), mode="edge")
    mass = np.concatenate(([0.0], np.cumsum(counts)))
    moment = np.concatenate(([0.0], np.cumsum(counts * values)))
    centres = _spread(values, counts, number)
    inner: NDArray[np.intp] | None = None
    for _ in range(_ITERATIONS):
        found = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        if inner is not None and np.array_equal(found, inner):
            break
        inner = found
        ends = np.concatenate(([0], inner, [len(values)]))
        masses = np.diff(mass[ends])
        sums = np.diff(moment[ends])
        centres = np.where(masses > 0, sums / np.maximum(masses, 1), centres)
    return centres


def _spread(
    values: NDArray[np.float64], counts: NDArray[np.float64], number: int
) -> NDArray[np.float64]:
    """Starting points: equal parts of the cube root of the density."""
    density, edges = np.histogram(values, bins=_BINS, weights=counts)
    mass = np.concatenate(([0.0], np.cumsum(np.cbrt(density))))
    places = (np.arange(number) + 0.5) / number * mass[-1]
    centres: NDArray[np.float64] = np.interp(places, mass, edges)
    return centres

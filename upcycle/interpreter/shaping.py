"""Operations that move elements about and compute nothing."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from upcycle.interpreter.arguments import Arguments, Evaluation, ProgramError

_SCATTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "update": lambda old, new: new,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.true_divide,
    "max": torch.maximum,
    "min": torch.minimum,
}


def select_slice(x: Tensor, given: Arguments, *, inside: bool = False) -> Tensor:
    """The part of x that `begin`, `end`, `stride` and their masks name, squeezed axes kept.

    It is a view of x as long as no stride is negative.

    Args:
        x: what the places are of.
        given: the operands.
        inside: whether all places must be inside x; those outside are left out otherwise.

    Raises:
        ProgramError: a place that must be inside x is not.
    """
    begin, end = given.per_axis("begin", x.ndim), given.per_axis("end", x.ndim)
    stride = given.per_axis("stride", x.ndim, [1] * x.ndim)
    from_start, to_end, single = (
        given.flags(key, x.ndim) for key in ("begin_mask", "end_mask", "squeeze_mask")
    )
    for axis in range(x.ndim):
        size, step = x.shape[axis], stride[axis]
        if single[axis]:  # only `begin` counts
            only = _from_front(begin[axis], size)
            _check_places(axis, size, only, only + 1)
            x = x.narrow(axis, only, 1)
            continue
        if step == 0:
            raise ProgramError(f"its stride on axis {axis} is 0")
        if inside:
            first = 0 if from_start[axis] else _from_front(begin[axis], size)
            last = size if to_end[axis] else _from_front(end[axis], size)
            _check_places(axis, size, first, last)
        chosen = slice(
            None if from_start[axis] else begin[axis], None if to_end[axis] else end[axis], step
        )
        places = range(*chosen.indices(size))
        if step > 0:
            x = x[(slice(None),) * axis + (slice(places.start, places.stop, step),)]
        else:
            x = x.index_select(axis, torch.tensor(places, dtype=torch.long))
    return x


def _check_places(axis: int, size: int, begin: int, end: int) -> None:
    """See that the slots from `begin` to before `end` exist, both counted from the front."""
    if not 0 <= begin <= end <= size:
        raise ProgramError(
            f"it names the slots {begin} .. {end - 1} of axis {axis}, which has 0 .. {size - 1}"
        )


def _from_front(place: int, size: int) -> int:
    """A place from the front; a negative one counts from the end."""
    return place + size if place < 0 else place


def _slice_by_index(given: Arguments) -> Tensor:
    return _squeezed(select_slice(given.stored("x"), given), given)


def _squeezed(part: Tensor, given: Arguments) -> Tensor:
    """A slice without the axes of which one place is named."""
    single = given.flags("squeeze_mask", part.ndim)
    return part.squeeze([axis for axis in range(part.ndim) if single[axis]])


def _slice_by_size(given: Arguments) -> Tensor:
    x = given.stored("x")
    begins, sizes = given.per_axis("begin", x.ndim), given.per_axis("size", x.ndim)
    for axis, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        whole = x.shape[axis]
        first = _from_front(begin, whole)
        last = whole if size == -1 else first + size
        _check_places(axis, whole, first, last)
        x = x.narrow(axis, first, last - first)
    return x


def update_slice(x: Tensor, given: Arguments) -> Tensor:
    """Return x with the named part replaced, in place.

    Raises:
        ProgramError: the part is outside x, or the update has another shape.
    """
    part, update = select_slice(x, given, inside=True), given.stored("update")
    if update.shape != _squeezed(part, given).shape:
        raise ProgramError(
            f"an update of shape {list(update.shape)} does not fit the part "
            f"{list(part.shape)} that it replaces"
        )
    part.copy_(update.reshape(part.shape))
    return x


def _slice_update(given: Arguments) -> Tensor:
    return update_slice(given.stored("x").clone(), given)


def _reshape(given: Arguments) -> Tensor:
    x = given.stored("x")
    # 0 keeps the size of that axis
    return x.reshape([size or x.shape[i] for i, size in enumerate(given.ints("shape"))])


def _expand_dims(given: Arguments) -> Tensor:
    x, axes = given.stored("x"), given.ints("axes")
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(given: Arguments) -> Tensor:
    x = given.stored("x")
    return x.squeeze(given.ints("axes")) if "axes" in given else x.squeeze()


def _concat(given: Arguments) -> Tensor:
    values, axis = given.all_stored("values"), given.integer("axis")
    if given.flag("interleave"):
        axis %= values[0].ndim
        return torch.stack(values, axis + 1).flatten(axis, axis + 1)
    return torch.cat(values, axis)


def _split(given: Arguments) -> tuple[Tensor, ...]:
    x, axis = given.stored("x"), given.integer("axis")
    if "split_sizes" in given:
        return torch.split_with_sizes(x, given.ints("split_sizes"), axis)
    return torch.tensor_split(x, given.integer("num_splits"), axis)


def _pad(given: Arguments) -> Tensor:
    x, pads = given.stored("x"), given.ints("pad")
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]  # of the last axes, in order
    flat = [size for pair in reversed(pairs) for size in pair]
    sides = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    given.expect([size + sum(side) for size, side in zip(x.shape, sides, strict=True)])
    mode = given.text("mode", "constant")
    if mode == "constant":
        return functional.pad(x, flat, value=given.number("constant_val", 0.0))
    tail = x.shape[x.ndim - len(pairs) :]
    padded = functional.pad(x.reshape(1, -1, *tail), flat, mode=mode)
    return padded.reshape(*x.shape[: x.ndim - len(pairs)], *padded.shape[2:])


def _band_part(given: Arguments) -> Tensor:
    x = given.stored("x")
    lower, upper = given.integer("lower", -1), given.integer("upper", -1)
    x = x if lower < 0 else x.triu(-lower)
    return x if upper < 0 else x.tril(upper)


def _one_hot(given: Arguments) -> Tensor:
    on = given.stored("on_value") if "on_value" in given else torch.tensor(1)
    off = given.stored("off_value") if "off_value" in given else torch.tensor(0)
    indices, axis = given.stored("indices"), given.integer("axis", -1)
    count = given.integer("one_hot_vector_size")
    place = axis % (indices.ndim + 1)
    given.expect((*indices.shape[:place], count, *indices.shape[place:]))
    classes = torch.arange(count)
    return torch.where(indices[..., None] == classes, on, off).movedim(-1, axis)


def _fill(given: Arguments) -> Tensor:
    given.expect(given.ints("shape"))
    return given.stored("value").reshape(()).expand(given.ints("shape"))


def _range(given: Arguments) -> Tensor:
    start, end, step = (given.stored(key).item() for key in ("start", "end", "step"))
    given.expect([max(0, math.ceil((end - start) / step))])
    return torch.arange(start, end, step)


def _tile(given: Arguments) -> Tensor:
    x = given.stored("x")
    reps = given.per_axis("reps", x.ndim)
    given.expect([size * times for size, times in zip(x.shape, reps, strict=True)])
    return x.repeat(reps)


def _reverse(given: Arguments) -> Tensor:
    x = given.stored("x")
    return x.flip(given.ints("axes", list(range(x.ndim))))


def _gather(given: Arguments) -> Tensor:
    x, indices, axis = given.stored("x"), given.stored("indices"), given.integer("axis", 0)
    batched = given.integer("batch_dims", 0)
    axis %= x.ndim
    if batched:
        shape = x.shape[:axis] + indices.shape[batched:] + x.shape[axis + 1 :]
        pairs = zip(x.flatten(0, batched - 1), indices.flatten(0, batched - 1), strict=True)
        return torch.stack([_pick(*pair, axis - batched) for pair in pairs]).reshape(shape)
    return _pick(x, indices, axis)


def _pick(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    picked = x.index_select(axis, _wrapped(indices, x.shape[axis]).reshape(-1))
    return picked.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _wrapped(indices: Tensor, size: int) -> Tensor:
    """Indices from the front; negative ones count from the end."""
    indices = indices.long()
    wrapped = torch.where(indices < 0, indices + size, indices)
    if wrapped.numel() and not 0 <= int(wrapped.min()) <= int(wrapped.max()) < size:
        raise ProgramError(
            f"an index of {int(indices.min())} .. {int(indices.max())} is outside 0 .. {size - 1}"
        )
    return wrapped


def _gather_along_axis(given: Arguments) -> Tensor:
    x, axis = given.stored("x"), given.integer("axis", 0)
    return x.gather(axis, _wrapped(given.stored("indices"), x.shape[axis]))


def _gather_nd(given: Arguments) -> Tensor:
    x, indices, batched = given.stored("x"), given.stored("indices"), given.integer("batch_dims", 0)
    return x[(*_batch_places(indices, batched), *_places(x, indices, batched))]


def _scatter_nd(given: Arguments) -> Tensor:
    x, indices = given.stored("data"), given.stored("indices")
    return _scattered(x, _places(x, indices, 0), given)


def _scatter_along_axis(given: Arguments) -> Tensor:
    x, indices = given.stored("data"), given.stored("indices")
    axis = given.integer("axis", 0) % x.ndim
    places = [
        _wrapped(indices, x.shape[axis]) if i == axis else grid
        for i, grid in enumerate(torch.meshgrid(*map(torch.arange, indices.shape), indexing="ij"))
    ]
    return _scattered(x, places, given)


def _scattered(x: Tensor, places: list[Tensor], given: Arguments) -> Tensor:
    mode, updates, result = given.text("mode", "add"), given.stored("updates"), x.clone()
    where = tuple(places)
    if mode == "add":  # the same element may be named more than once
        return result.index_put_(where, updates.to(x.dtype), accumulate=True)
    if mode not in _SCATTERS:
        raise ProgramError(f"its mode is {mode!r}")
    made = _SCATTERS[mode](result[where], updates).to(x.dtype)
    result[where] = made
    if not torch.equal(result[where].nan_to_num(), made.nan_to_num()):
        raise ProgramError("it gives one element two values, in no order")
    return result


def _places(x: Tensor, indices: Tensor, batched: int) -> list[Tensor]:
    return [_wrapped(part, x.shape[batched + i]) for i, part in enumerate(indices.unbind(-1))]


def _batch_places(indices: Tensor, batched: int) -> list[Tensor]:
    rest = indices.ndim - 1 - batched
    return [
        torch.arange(indices.shape[axis]).reshape(-1, *[1] * (batched - 1 - axis + rest))
        for axis in range(batched)
    ]


def _flatten2d(given: Arguments) -> Tensor:
    x, axis = given.stored("x"), given.integer("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _of_x(function: Callable[[Tensor], Tensor]) -> Evaluation:
    return lambda given: function(given.stored("x"))


SHAPING: dict[str, Evaluation] = {
    "identity": _of_x(lambda x: x),
    "shape": _of_x(lambda x: torch.tensor(x.shape)),
    "non_zero": _of_x(torch.nonzero),
    "band_part": _band_part,
    "concat": _concat,
    "expand_dims": _expand_dims,
    "fill": _fill,
    "fill_like": lambda given: given.stored("value").expand(given.stored("ref_tensor").shape),
    "flatten2d": _flatten2d,
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "gather_nd": _gather_nd,
    "one_hot": _one_hot,
    "pad": _pad,
    "range_1d": _range,
    "reshape": _reshape,
    "reverse": _reverse,
    "scatter_along_axis": _scatter_along_axis,
    "scatter_nd": _scatter_nd,
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "slice_update": _slice_update,
    "split": _split,
    "squeeze": _squeeze,
    "stack": lambda given: torch.stack(given.all_stored("values"), given.integer("axis")),
    "tile": _tile,
    "transpose": lambda given: given.stored("x").permute(given.ints("perm")),
}

"""See in one forward pass what writes to a model's residual stream, and what reads it."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from upcycle.export.layers import ScaledNorm

_NORMS = (ScaledNorm, nn.LayerNorm, nn.RMSNorm)
_SUMS = {"add", "radd", "iadd"}
_PRODUCTS = {"mul", "rmul", "div", "truediv"}
_VIEWS = {
    "clone", "contiguous", "dropout", "expand", "flatten", "float", "getitem", "reshape", "squeeze",
    "to", "type_as", "unsqueeze", "view",
}  # fmt: skip


class Linear(NamedTuple):
    """A linear map by its parameters: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


Endpoint = Linear | nn.Module


class _Tag(NamedTuple):
    """What is known of a tensor: whether it is the stream, or else whose outputs it sums."""

    in_stream: bool
    sources: tuple[Endpoint, ...] = ()


class ResidualStream(TorchFunctionMode):
    """Follows the residual stream of a causal LM while its forward runs in this context.

    The stream begins at the embeddings and goes on through sums, views and scalar factors.

    Args:
        model: of transformers; guarded norms count as norms, like torch's own.

    Attributes:
        embeddings: modules that begin it.
        writers: linear maps, and norms, whose output is added to it.
        readers: the same, which take it as their input.
        peak: the largest magnitude in it and of what was added to it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embeddings: list[nn.Module] = []
        self.writers: list[Endpoint] = []
        self.readers: list[Endpoint] = []
        self.peak = 0.0
        self._model = model
        self._tags: dict[int, tuple[Tensor, _Tag]] = {}  # with the tensors, or ids would recur
        self._norms_around = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> "ResidualStream":
        for module in self._model.modules():
            if isinstance(module, nn.Embedding):
                self._hooks.append(module.register_forward_hook(self._after_embedding))
            elif isinstance(module, _NORMS):
                self._hooks.append(module.register_forward_pre_hook(self._before_norm))
                self._hooks.append(module.register_forward_hook(self._after_norm))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._tags.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._norms_around or not isinstance(result, Tensor):
            return result
        name = func.__name__.strip("_")
        if func is nn.functional.linear:
            linear = Linear(args[1], args[2] if len(args) > 2 else None)
            self._read(args[0], linear)
            self._tag(result, _Tag(False, (linear,)))
        elif name in _SUMS:
            self._add(result, args)
        elif name in _VIEWS or (name in _PRODUCTS and _by_scalar(args)):
            tag = next((tag for x in args if (tag := self._tag_of(x))), None)
            if tag is not None:
                self._tag(result, tag)
        return result

    def _add(self, result: Tensor, operands: tuple[Any, ...]) -> None:
        tags = [self._tag_of(x) for x in operands]
        added = tuple(part for tag in tags if tag and not tag.in_stream for part in tag.sources)
        if any(tag and tag.in_stream for tag in tags):
            self._extend(self.writers, added)
            self._tag(result, _Tag(True))
            self.peak = max(self.peak, *(float(x.abs().max()) for x in operands))
        elif all(tags):
            self._tag(result, _Tag(False, added))

    def _after_embedding(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self._extend(self.embeddings, (module,))
        self._tag(output, _Tag(True))

    def _before_norm(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._read(args[0], module)
        self._norms_around += 1

    def _after_norm(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self._norms_around -= 1
        self._tag(output, _Tag(False, (module,)))

    def _read(self, x: Tensor, reader: Endpoint) -> None:
        tag = self._tag_of(x)
        if tag is not None and tag.in_stream:
            self.peak = max(self.peak, float(x.abs().max()))
            self._extend(self.readers, (reader,))

    def _tag(self, x: Tensor, tag: _Tag) -> None:
        self._tags[id(x)] = x, tag

    def _tag_of(self, x: Any) -> _Tag | None:
        known = self._tags.get(id(x))
        return None if known is None else known[1]

    @staticmethod
    def _extend(parts: list[Any], more: tuple[Any, ...]) -> None:
        """Each once, by identity: tensors compare by their elements."""
        for part in more:
            if not any(_same(part, known) for known in parts):
                parts.append(part)


def _same(part: Endpoint, other: Endpoint) -> bool:
    if isinstance(part, Linear) and isinstance(other, Linear):
        return part.weight is other.weight
    return part is other


def _by_scalar(operands: tuple[Any, ...]) -> bool:
    return sum(isinstance(x, Tensor) and x.numel() > 1 for x in operands) == 1

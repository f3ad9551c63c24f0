"""The weights of a model that can be quantised, their roles, and the scheme of each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from upcycle.errors import ExportError
from upcycle.export.quantize.schemes import Quantization, Role, Scheme

_SMALLEST = 16  # rows and columns; gates with fewer are not worth it


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix, or a stack of one matrix for each expert.

    Attributes:
        name: path of the parameter in the model.
        role: what it is for.
        layer: index of its layer, None outside the layers.
        shape: [out, in], or [experts, out, in].
        transposed: whether the last two are [in, out] instead.
        aliases: other paths of the same parameter.
    """

    name: str
    role: Role
    layer: int | None
    shape: tuple[int, ...]
    transposed: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.shape[-1 if self.transposed else -2]

    @property
    def inputs(self) -> int:
        """Input channels."""
        return self.shape[-2 if self.transposed else -1]

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of experts."""
        return len(self.shape) == 3

    def place(self) -> str:
        """Where it is, for error messages."""
        return f"{self.name} {list(self.shape)}"


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The path and the list of the layers of a causal LM of transformers."""
    return next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )


def is_tied(model: Any) -> bool:
    """Whether the input embedding is also the output matrix."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def untie(model: Any) -> None:
    """Give a tied model an output matrix of its own, which shares the embedding's memory."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)


def find_weights(model: Any) -> list[WeightMatrix]:
    """All weights of a causal LM of transformers that have a role, in the model's order.

    Norms, biases, routers, learned positions and tiny matrices have none.
    """
    layers, _ = decoder_layers(model)
    head = model.get_output_embeddings().weight
    outer: dict[int, Role] = {
        id(model.get_input_embeddings().weight): "embedding",
        id(head): "lm_head",  # a tied pair is one constant, and logits need the more bits
    }
    found = []
    for parameter, (first, *others) in parameters_with_paths(model):
        owner, _, _ = first.rpartition(".")
        shape = tuple(parameter.shape)
        within = f"{owner}.".startswith(f"{layers}.")
        role = _role_in_layer(model, owner) if within else outer.get(id(parameter))
        if role and len(shape) in (2, 3) and min(shape[-2:]) >= _SMALLEST:
            layer = int(owner[len(layers) + 1 :].split(".")[0]) if within else None
            is_transposed = getattr(model.get_submodule(owner), "is_transposed", False)
            transposed = len(shape) == 3 and is_transposed
            found.append(WeightMatrix(first, role, layer, shape, transposed, tuple(others)))
    return found


def parameters_with_paths(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Every parameter with all its paths: a tied one has several."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def _role_in_layer(model: nn.Module, owner: str) -> Role | None:
    parts = owner.split(".")
    modules = (model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))
    names = [type(module).__name__ for module in modules]
    if names[-1].endswith("Router"):
        return None
    return "attention" if any(name.endswith("Attention") for name in names) else "ffn"


def assign(
    quantization: Quantization, weights: Collection[WeightMatrix], promoted: Collection[int] = ()
) -> dict[str, Scheme]:
    """The scheme of each weight that is quantised, by its name.

    Raises:
        ExportError: a group or block does not divide a weight, or a rule fits no weight.
    """
    layers = {weight.layer for weight in weights} - {None}
    named = {layer for rule in quantization.overrides for layer in rule.layers}
    if named - layers:
        raise ExportError(
            f"there is no layer {min(named - layers)}",
            where="--quantize: overrides",
            fix=f"name layers from 0 to {len(layers) - 1}",
        )
    if quantization.promote and quantization.promote.count > len(layers):
        raise ExportError(
            f"{quantization.promote.count} layers are to be promoted, but there are {len(layers)}",
            where="--quantize: promote",
            fix="promote fewer layers, or quantise all of them to 8 bits (int8)",
        )
    schemes = {
        weight.name: scheme
        for weight in weights
        if (scheme := quantization.scheme(weight.role, weight.layer, promoted)) is not None
    }
    for weight in weights:
        if weight.name in schemes:
            _check_sizes(weight, schemes[weight.name])
    return schemes


def split_palettes(
    schemes: Mapping[str, Scheme], weights: Mapping[str, WeightMatrix], parts: int
) -> dict[str, Scheme]:
    """The schemes where the output head is split: each part has its own palettes.

    Args:
        schemes: of `assign`.
        weights: by name.
        parts: how many there are.

    Raises:
        ExportError: a palette would belong to two parts.
    """

    def fitted(name: str, scheme: Scheme) -> Scheme:
        weight = weights[name]
        if parts == 1 or weight.role != "lm_head" or scheme.kind != "palette":
            return scheme
        rows, left = divmod(weight.channels, parts)
        if left or rows % (scheme.group or rows):
            fitting = _divisor(weight.channels // (scheme.group or 1), parts)
            raise ExportError(
                f"{weight.channels:,} output channels as {scheme} do not split into {parts} parts "
                "with whole palettes",
                where=f"--split-head, and --quantize for {weight.place()}",
                fix=f"pass --split-head {fitting}",
            )
        return scheme.model_copy(update={"group": scheme.group or rows})

    return {name: fitted(name, scheme) for name, scheme in schemes.items()}


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above another."""
    return max(d for d in range(1, most + 1) if number % d == 0)


def _check_sizes(weight: WeightMatrix, scheme: Scheme) -> None:
    sizes = (("group", scheme.group, weight.channels), ("block", scheme.block, weight.inputs))
    for name, size, number in sizes:
        # A stack of experts has one palette for each.
        if size and number % size and not (name == "group" and weight.stacked):
            raise ExportError(
                f"a {name} of {size} does not divide {number} channels",
                where=f"{weight.place()} ({weight.role})",
                fix=f"set {name}: {_divisor(number, size)} for it in a YAML file given to "
                "--quantize",
            )


def bits_by_role(
    weights: Collection[WeightMatrix], schemes: Mapping[str, Scheme]
) -> dict[str, str]:
    """For people: how each role is stored, with the number of weights of each kind."""
    counts: dict[str, dict[str, int]] = {}
    for weight in weights:
        kind = str(schemes[weight.name]) if weight.name in schemes else "fp16"
        counts.setdefault(weight.role, {}).setdefault(kind, 0)
        counts[weight.role][kind] += 1
    return {
        role: ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        for role, kinds in counts.items()
    }

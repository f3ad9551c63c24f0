"""Run the functions of a saved Core ML program in torch, on any machine.

It shows what the program means. It does not show what a device makes of it: the order of sums in
fp16, where operations are placed, or whether Apple's compiler takes it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from upcycle.errors import ExportError
from upcycle.interpreter.arguments import Arguments, ProgramError, Value, evaluating, fits
from upcycle.interpreter.constants import TORCH_TYPES
from upcycle.interpreter.prepare import Loaded, Step, evaluated
from upcycle.interpreter.shaping import update_slice
from upcycle.program.operation import Operation, TensorType

# Told of every result of an operation, before it is rounded.
Observer = Callable[[Operation, Tensor], None]


class Interpreter:
    """A program with its states.

    Args:
        loaded: a package's functions, which several interpreters may share.
        half: round each operation's result to the type that the program declares, as a device does
            that computes in fp16; otherwise all floats are fp32. Sums are always fp32.
        observe: told of every result of an operation.

    Attributes:
        states: the content of each state, zeros at first; all functions share them.
    """

    def __init__(self, loaded: Loaded, *, half: bool, observe: Observer | None = None) -> None:
        self._loaded = loaded
        self.half = half
        self.observe = observe
        self.states: dict[str, Tensor] = {}
        for function in loaded.graph.functions.values():
            for name, state in function.states.items():
                self.states[name] = torch.zeros(_sizes(state), dtype=self._kept_as(state.dtype))

    @torch.inference_mode()
    def reset(self) -> None:
        """Fill the states with zeros."""
        for state in self.states.values():
            state.zero_()

    def state(self, name: str) -> Tensor:
        """The content of a state."""
        return self.states[name]

    @torch.inference_mode()
    def run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call a function.

        Args:
            name: of the function.
            inputs: by name, of the shapes that it declares.

        Returns:
            Its outputs by name.

        Raises:
            ProgramError: an operation asks for what is not there.
            ExportError: there is no such function, an operation of it is not known, an input is
                missing or has another shape, or a constant cannot be read.
        """
        prepared = self._loaded.function(name)
        values = _Values(prepared.constants)
        for key in prepared.function.inputs:
            values[key] = self._input(key, prepared.function.types[key], inputs)
        for step in prepared.steps:
            with evaluating(name, step.operation):
                results = self._evaluate(step, values)
            for key, result in zip(step.operation.outputs, results, strict=True):
                values[key] = result
            for key in step.dying:
                values.pop(key, None)
        return {key: values.tensor(key) for key in prepared.function.outputs}

    def _input(self, name: str, declared: TensorType, inputs: Mapping[str, Tensor]) -> Tensor:
        shape = tuple(inputs[name].shape) if name in inputs else None
        if shape is None or not fits(shape, declared):
            raise ExportError(
                f"input {name!r} has the shape {shape}"
                if shape is not None
                else f"input {name!r} is missing",
                where="the call of the program",
                fix=f"give {declared.dtype} of shape {declared.shape}",
            )
        return self._settled(inputs[name], declared.dtype)

    def _evaluate(self, step: Step, values: "_Values") -> tuple[Tensor, ...]:
        op = step.operation
        if op.type == "read_state":
            return (self.states[op.inputs["input"][0]],)
        if op.type == "write_state":
            name, content = op.inputs["input"][0], values.tensor(op.inputs["data"][0])
            if content.shape != self.states[name].shape:
                old, new = list(self.states[name].shape), list(content.shape)
                raise ProgramError(f"the state {name!r} of shape {old} would become {new}")
            self.states[name] = content.to(self.states[name].dtype)
            return ()
        given = Arguments(op, values, step.types)
        if step.into and self._can_overwrite(step, values):
            updated = (update_slice(given.stored("x"), given),)
            given.check_results(updated)
            return updated
        results = evaluated(op, given)
        if self.observe:
            for result in results:
                if result.is_floating_point():
                    self.observe(op, result)
        return tuple(
            self._settled(result, declared.dtype)
            for result, declared in zip(results, step.types, strict=True)
        )

    def _can_overwrite(self, step: Step, values: "_Values") -> bool:
        """Whether a `slice_update` may write into its state: nothing else sees the old content.

        A copy of a whole KV cache for each layer would take most of the time.
        """
        assert step.into is not None
        name = step.operation.inputs["x"][0]
        memory = self.states[step.into].untyped_storage().data_ptr()
        sharing = [key for key, value in values.items() if _memory(value) == memory]
        return sharing == [name] and name in step.dying

    def _settled(self, value: Tensor, dtype: str) -> Tensor:
        """A result as the next operation gets it."""
        if dtype == "uint16" and not value.is_floating_point():
            value = value % (1 << 16)
        return value.to(self._kept_as(dtype))

    def _kept_as(self, dtype: str) -> torch.dtype:
        kept = TORCH_TYPES[dtype]
        return torch.float32 if kept.is_floating_point and not self.half else kept


class _Values(dict[str, Value]):
    """Values of one call, over the constants of the function."""

    def __init__(self, constants: Mapping[str, Value]) -> None:
        super().__init__()
        self._constants = constants

    def __missing__(self, key: str) -> Value:
        if key not in self._constants:
            raise ProgramError(f"{key!r} is read before it is made")
        return self._constants[key]

    def tensor(self, key: str) -> Tensor:
        value = self[key]
        if not isinstance(value, Tensor):
            raise ProgramError(f"{key!r} is the word {value!r}, not a tensor")
        return value


def _memory(value: Value) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def _sizes(declared: TensorType) -> list[int]:
    return [size or 0 for size in declared.shape]

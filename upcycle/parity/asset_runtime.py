"""Apple's runtime in a process of its own: it ends its process where a program is wrong.

Run as a script, with nothing of this package imported: `runtime.py ASSET` answers pickled requests
from stdin on stdout. The first answer, to none, says that the asset is loaded.
"""

import asyncio
import os
import pickle
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


async def serve(asset: Path, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more: ("run", function, inputs), ("reset",), ("state", s).

    Args:
        asset: an `.aimodel`.
        requests: inputs are numpy arrays by name, cast to what the function takes.
        answers: outputs are numpy arrays by name.
    """
    from coreai.authoring import AIModelAsset
    from coreai.runtime import NDArray

    def answer(content: Any) -> None:
        pickle.dump(content, answers)
        answers.flush()

    async with AIModelAsset.load(asset).executable() as model:
        functions = {name: model.load_function(name) for name in model.function_names}
        described = {
            name: function.desc.state_descriptor(name)
            for function in functions.values()
            for name in function.desc.state_names
        }

        def empty() -> dict[str, Any]:
            return {
                name: NDArray(np.zeros(each.shape, dtype=each.dtype))
                for name, each in described.items()
            }

        states = empty()
        answer(sorted(functions))
        while True:
            try:
                request = pickle.load(requests)
            except EOFError:
                return
            match request:
                case ("run", name, inputs):
                    function = functions[name]
                    given = {
                        key: NDArray(value.astype(function.desc.input_descriptor(key).dtype))
                        for key, value in inputs.items()
                    }
                    own = {key: states[key] for key in function.desc.state_names}
                    made = await function(given, state=own)
                    answer({key: np.array(value.numpy()) for key, value in made.items()})
                case ("reset",):
                    states = empty()
                    answer(None)
                case ("state", name):
                    answer(np.array(states[name].numpy()))


if __name__ == "__main__":
    # The runtime prints to stdout, which is for answers.
    own_stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(serve(Path(sys.argv[1]), sys.stdin.buffer, own_stdout))

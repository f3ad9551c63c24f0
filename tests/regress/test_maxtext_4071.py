"""AI-Hypercomputer/maxtext#4071 and #4160: converters that hold all shards, and start again.

Also JustVugg/colibri#543, arcee-ai/mergekit#13, meta-pytorch/torchtune#1092 and
pytorch/executorch#17469. `tests/conversion/test_kill.py` kills and resumes a conversion; here its
memory stays what one layer needs.
"""

import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint

# Prints the growth of the process's peak memory by the second conversion, in KiB.
CHILD = """
import resource, sys
from tests.tiny import convert

def convert_and_peak(source):
    convert(source, source + "-out", kv_heads=2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small, large = map(convert_and_peak, sys.argv[1:])
print(large - small)
"""


def test_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path) -> None:
    folders = []
    for layers in (2, 16):
        folder = tmp_path / str(layers)
        tiny_checkpoint(folder, hidden_size=512, num_hidden_layers=layers, max_shard_size="10MB")
        folders.append(str(folder))
    large = Checkpoint.open(folders[1])
    assert len(large.headers) >= 8
    assert large.weight_bytes > 64 << 20
    command = [sys.executable, "-c", CHILD, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 10

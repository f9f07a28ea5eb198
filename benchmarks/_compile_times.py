"""What compiling costs: CPU seconds, hits in the caches on disk, nodes of the backward.

Each measurement has a process of its own. The first one for a system has empty caches,
and the next one those that it left. Seconds are those of the process, after a small
function has loaded inductor; those of the C++ compilers that it starts count apart. Run
this with a system and a number of blocks, as a child; `compiled.py` shows the results.

Invariant: systems take turns, and each round has new caches.
Rejected: several systems in one process. Dynamo and inductor keep what they compiled.
"""

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _systems import BASELINE, DEFAULT, PLAIN, SYSTEMS
from torch import Tensor


DEPTHS = 6, 12, 24
BATCH, WIDTH, HIDDEN = 16, 32, 64
COMPARED = PLAIN, BASELINE, DEFAULT

Found = dict[str, float]
Key = tuple[str, int]  # a system, how many blocks


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Apply a residual perceptron with a gate."""
    h = torch.tanh(x @ w1)
    return x + torch.tanh((h * torch.sigmoid(h)) @ w2)


def step_of(system: str, blocks: int) -> Callable[..., None]:
    """Return a forward and backward that compiles with the options it is given."""
    torch.manual_seed(0)
    step, x = SYSTEMS[system](block), torch.randn(BATCH, WIDTH)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    weights = [
        [torch.randn(shape, requires_grad=True) for shape in shapes]
        for _ in range(blocks)
    ]

    def loss(x: Tensor) -> Tensor:
        for pair in weights:
            x = step(x, *pair)
        return x.square().mean()

    def run(**options: Any) -> None:
        torch.compile(loss, fullgraph=True, **options)(x).backward()

    return run


def nodes_of_backward(run: Callable[..., None]) -> int:
    """Return how many nodes the graph of the backward has, as inductor gets it."""
    backends: Any = importlib.import_module("torch._dynamo.backends.common")
    aot: Any = importlib.import_module("torch._functorch.aot_autograd")
    partition: Any = importlib.import_module("torch._functorch.partitioners")
    sizes: list[int] = []

    def forward(graph: Any, inputs: Any) -> Any:
        del inputs
        return aot.make_boxed_func(graph.forward)

    def backward(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return forward(graph, inputs)

    torch.compiler.reset()
    run(
        backend=backends.aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=partition.min_cut_rematerialization_partition,
        )
    )
    return sum(sizes)


def measured(system: str, blocks: int) -> Found:
    """Compile, with whatever caches there are."""
    x = torch.ones(3, requires_grad=True)
    torch.compile(torch.sin)(x).sum().backward()
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    run = step_of(system, blocks)
    start, start_of_compilers = time.process_time(), sum(os.times()[2:4])
    run()
    return {
        "seconds": time.process_time() - start,
        "of compilers": sum(os.times()[2:4]) - start_of_compilers,
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "nodes": nodes_of_backward(run),
    }


def in_a_process(key: Key, folder: str) -> Found:
    """Compile in a new process, with the caches in a folder."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, __file__, *map(str, key)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def cold_and_warm(key: Key) -> tuple[Found, Found]:
    """Compile twice: with empty caches, and with what that left."""
    with tempfile.TemporaryDirectory() as folder:
        return in_a_process(key, folder), in_a_process(key, folder)


def all_rounds(
    rounds: int, depths: Iterable[int] = DEPTHS
) -> dict[Key, list[tuple[Found, Found]]]:
    """Measure each system at each depth, cold and warm, in random order by round."""
    keys = [(system, blocks) for blocks in depths for system in COMPARED]
    found: dict[Key, list[tuple[Found, Found]]] = {key: [] for key in keys}
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample(keys, len(keys)):
            found[key].append(cold_and_warm(key))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))

"""What the processes of a job do in tests/test_cuda_processes.py: ``cuda_process_cases.py SCENARIO OUTPUT [...]``.

Run by ``jax_mok launch``; on one GPU the processes share it. XLA's own collectives cannot do that, so nothing here uses
any: each process writes its part of a result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from layer_cases import make_inputs
from process_cases import place, program

import jax_mok as mok
from jax_mok import runtime

SAVE = mok.MoEConfig(backend="cuda", residuals="save")
RECOMPUTE = mok.MoEConfig(backend="cuda", residuals="recompute")
CONFIG = mok.MoEConfig(backend="cuda", timeout_s=2.5, first_call_timeout_s=100)
STEPS = 6


def layer_runs() -> dict[str, tuple[Any, mok.MoEConfig]]:
    """Inputs and configuration by case; the arena grows, and is used again."""
    small = make_inputs(64, 256, 136, 8, 2, dtype="bfloat16", seed=1)
    large = make_inputs(1024, 512, 264, 16, 6, dtype="bfloat16", seed=2)
    hot = make_inputs(512, 256, 136, 8, 2, dtype="bfloat16", ids=np.full((512, 2), 7), seed=3)
    return {
        "small": (small, SAVE),
        "large": (large, SAVE),
        "large, recomputed": (large, RECOMPUTE),
        "one expert": (hot, SAVE),
        "small again": (small, RECOMPUTE),
    }


def local_part(tree: Any) -> list[np.ndarray]:
    """Of each array the rows that this process has, as words."""

    def rows(a: jax.Array) -> np.ndarray:
        shards = sorted(a.addressable_shards, key=lambda s: s.index[0].start or 0)
        return np.concatenate([np.asarray(s.data) for s in shards])

    return [rows(a).view(np.uint8) for a in jax.tree.leaves(tree)]


def layer(output: str) -> None:
    """Output and gradients of each case, twice."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hit" in name else None)
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    for name, (inputs, config) in layer_runs().items():
        step, args = program(mesh, config), place(inputs, mesh)
        found = [local_part(step(args)) for _ in range(2)]
        for first, second in zip(*found, strict=True):
            np.testing.assert_array_equal(first, second)
        np.savez(Path(output, f"{name} {jax.process_index()}"), *found[0])
    report(output, {"bytes": runtime.device_held_bytes(), "cache_hits": len(hits)})


def half_cached(output: str) -> None:
    """The same, but process 1 has no persistent cache."""
    jax.config.update("jax_enable_compilation_cache", jax.process_index() == 0)
    layer(output)


class Chain:
    """Several layers in one program, which the host starts before the first has ended."""

    def __init__(self, layers: int = 3) -> None:
        mesh = Mesh(np.array(jax.devices()), ("expert",))
        good, bad = (make_inputs(240, 256, 128, 12, 2, dtype="bfloat16", seed=3) for _ in range(2))
        bad.ids[-1, 1] = 12
        self._good, self._bad = place(good, mesh), place(bad, mesh)

        @jax.jit
        def run(a: Any) -> Any:
            x = a.x
            for _ in range(layers):
                x = mok.moe(x, a.ids, a.weights, a.experts, mesh=mesh, config=CONFIG)
            return x

        self._run = run

    def __call__(self, *, good: bool = True) -> dict[str, Any]:
        """What came of a step."""
        start = time.monotonic()
        try:
            with mok.typed_errors():
                (y,) = local_part(self._run(self._good if good else self._bad))
        except mok.MoEError as error:
            found = {"error": type(error).__name__, "message": str(error)}
        else:
            nan = bool(np.isnan(y.view(jnp.bfloat16).astype(np.float32)).all())
            found = {"nan": True} if nan else {"sum": int(y.astype(np.int64).sum())}
        return {**found, "seconds": time.monotonic() - start}


def bad_ids(output: str) -> None:
    step = Chain()
    report(output, [step(good=number not in (1, 4)) for number in range(STEPS + 2)])


def away(output: str) -> None:
    """Process 1 does something else after a step that failed. Its peer need not wait to hear when both will raise."""
    step, found = Chain(layers=1), []
    for number in range(4):
        time.sleep(1.5 if (jax.process_index(), number) == (1, 2) else 0.0)
        found.append(step(good=number != 1))
    report(output, found)


def out_of_step(output: str) -> None:
    """Process 1 runs a program alone, of layers with the same shape."""
    step, other = Chain(), Chain(layers=1)
    found = [step(), other()]
    if jax.process_index() == 1:
        other()
    found += [step() for _ in range(2)]
    report(output, found)


def killed(output: str, victim: str) -> None:
    """A process is killed before its second step; the others say so in every later one."""
    step = Chain()
    found = [step()]
    if jax.process_index() == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    found += [step() for _ in range(3)]
    report(output, found)
    os._exit(0)  # the job is over; what is left of it does not wait for the dead


def late(output: str) -> None:
    """Process 1 is late for the first call, which peers wait for longer, and then for the third step."""
    step, found = Chain(), []
    for number in range(4):
        time.sleep({(1, 0): 6.0, (1, 2): 6.0}.get((jax.process_index(), number), 0.0))
        found.append(step())
    report(output, found)


def timing(output: str, hidden: str, inter: str, experts: str, top_k: str) -> None:
    """Milliseconds of a forward call, where every process has a GPU of its own."""
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    tokens = 8192 * mesh.size
    args = place(make_inputs(tokens, *map(int, (hidden, inter, experts, top_k)), dtype="bfloat16"), mesh)
    run = jax.jit(lambda a: mok.moe(*a[:4], mesh=mesh, config=SAVE))
    jax.block_until_ready(run(args))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(50):
            y = run(args)
        jax.block_until_ready(y)
        samples.append((time.perf_counter() - start) / 50)
    report(output, {"ms": 1e3 * float(np.median(samples))})


def report(output: str, result: Any) -> None:
    """One file per process."""
    Path(output, f"{jax.process_index()}.json").write_text(json.dumps(result))


SCENARIOS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (layer, half_cached, bad_ids, away, out_of_step, killed, late, timing)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])

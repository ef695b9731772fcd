"""What the processes of a job do in tests/test_processes.py: ``process_cases.py SCENARIO OUTPUT [...]``.

Run by ``jax_mok launch``. ``layer_digests`` runs in the test's own process too, whose results are the ones to meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import Inputs, make_inputs

import jax_mok as mok
from jax_mok import runtime
from jax_mok.cli.launch import free_port

SHORT = ("bfloat16", "float32, recomputed")
CPU = mok.MoEConfig(backend="cpu")  # an error where it cannot run, not a fallback


def put(value: Any, mesh: Mesh, spec: P) -> jax.Array:
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def place(inputs: Inputs, mesh: Mesh) -> Inputs:
    """On the mesh: tokens over all of its axes, experts over "expert"."""
    tokens = P(mesh.axis_names)
    shared = None if inputs.shared is None else mok.Experts(*(put(a, mesh, P()) for a in inputs.shared))
    experts = mok.Experts(*(put(a, mesh, P("expert")) for a in inputs.experts))
    x, ids, weights, dy = (put(a, mesh, tokens) for a in (inputs.x, inputs.ids, inputs.weights, inputs.dy))
    return Inputs(x, ids, weights, experts, shared, dy)


def gathered(a: jax.Array) -> np.ndarray:
    return np.asarray(a if a.is_fully_addressable else multihost_utils.process_allgather(a, tiled=True))


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in map(gathered, jax.tree.leaves(tree)):
        found.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def program(mesh: Mesh, config: mok.MoEConfig) -> Callable[[Inputs], Any]:
    """Output and routed gradients."""

    @jax.jit
    def run(a: Inputs) -> Any:
        def layer(x: Any, weights: Any, experts: Any) -> Any:
            return mok.moe(x, a.ids, weights, experts, shared=a.shared, mesh=mesh, config=config)

        y, pull = jax.vjp(layer, a.x, a.weights, a.experts)
        return y, *pull(a.dy)

    return run


def local_program(mesh: Mesh, layer: Callable[..., Any]) -> Any:
    """In the caller's own shard_map, which does not say which mesh it is on."""
    by_rank = P("expert")
    specs = (by_rank, by_rank, by_rank, mok.Experts(by_rank, by_rank, by_rank))
    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=by_rank, check_vma=False))


def on_host(act: Callable[[int], None], x: Any, *after: Any) -> Any:
    """``x``, once ``act(rank)`` is done on the host, and that once ``after`` is there."""

    def run(rank: Any, x: Any, *_: Any) -> Any:
        act(int(rank))
        return np.asarray(x)

    return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("expert"), x, *after)


def independent_layers(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
    """Layers of the same shapes with no order between them, which reach every rank in another order. Their weight
    gradients show whether all ranks took part in the same layer."""

    def gate_gradient(number: int) -> Any:
        skewed = on_host(lambda rank: time.sleep(0.05 * ((rank + number) % 4)), x) * (1 + number)
        y, pull = jax.vjp(lambda experts: mok.local_moe(skewed, ids, weights, experts, config=CPU), experts)
        return pull(y)[0].gate

    return jnp.stack([gate_gradient(i) for i in range(4)], axis=1)


def layer_digests(devices: Sequence[Any], wanted: Sequence[str] = ()) -> dict[str, str]:
    """Digests by case, for the EP group of these devices. The same for any number of devices and of processes."""
    found: dict[str, str] = {}
    n = len(devices)
    mesh = Mesh(np.array(devices), ("expert",))
    small = make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", shared=16, seed=1)
    on_mesh = place(small, mesh)
    save = program(mesh, CPU)

    def case(name: str, run: Callable[[], Any]) -> None:
        if not wanted or name in wanted:
            found[name] = digest(run())

    def alternating() -> Any:
        evaluate = jax.jit(lambda a: mok.moe(*a[:4], mesh=mesh, config=CPU))
        return [(save(on_mesh), evaluate(on_mesh)) for _ in range(3)]

    def in_flight() -> Any:
        batches = [place(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16", shared=16, seed=s), mesh) for s in range(6)]
        return [save(b) for b in batches]

    def over_axes(*names: str) -> Any:
        sizes = [max(1, n // 2) if name == "expert" else min(2, n) for name in names]
        other = Mesh(np.array(devices).reshape(sizes), names)
        y, dx, dw, _ = program(other, CPU)(place(small, other))  # XLA sums the rest over "data"
        return y, dx, dw

    def permuted() -> Any:
        other = Mesh(np.array([*devices[1::2], *devices[::2]]), ("expert",))
        return program(other, CPU)(place(small, other))

    def scanned() -> Any:
        def layers(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            layer = lambda x, _: (mok.moe(x, ids, weights, experts, mesh=mesh, config=CPU), None)  # noqa: E731
            return jax.lax.scan(layer, x, None, 5)[0]

        return jax.jit(layers)(*on_mesh[:4])

    case("bfloat16", lambda: save(on_mesh))
    full = make_inputs(64, 40, 24, 8, 3, dtype="float32", seed=2)
    case(
        "float32, recomputed",
        lambda: program(mesh, mok.MoEConfig(backend="cpu", residuals="recompute"))(place(full, mesh)),
    )
    large = make_inputs(320, 96, 64, 8, 4, dtype="bfloat16", seed=3)
    case("larger", lambda: program(mesh, CPU)(place(large, mesh)))
    case("smaller again", lambda: save(on_mesh))
    runtime.release()
    case("training and evaluation in turn", alternating)
    case("many runs in flight", in_flight)
    case("data, then expert", lambda: over_axes("data", "expert"))
    case("expert, then data", lambda: over_axes("expert", "data"))
    case("permuted devices", permuted)
    case("one call site, many times", scanned)
    case("independent layers", lambda: local_program(mesh, independent_layers)(*on_mesh[:4]))
    return found


# ---- how a test starts them ----


def launch(processes: int, devices: int, script: Path, *args: Any, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jax_mok", "launch", "-n", processes, "--devices-per-process", devices]
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [*map(str, [*command, script, *args])],
        env={**clean, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


# ---- scenarios ----


def report(output: str, result: Any) -> None:
    """One file per process."""
    Path(output, f"{jax.process_index()}.json").write_text(json.dumps(result))


def layer(output: str, cases: str) -> None:
    """The same bits as in one process; and groups inside processes, refusals and names of shared memory."""
    found = layer_digests(jax.devices(), SHORT if cases == "short" else ())
    inside = layer_digests(jax.local_devices(), SHORT[:1]) if jax.local_device_count() > 1 else {}
    report(output, {"spanning": found, "inside": inside})


def ambiguous(output: str) -> None:
    """A mesh that may be of one process or of two, in a shard_map that does not say."""
    half = jax.device_count() // 2
    mesh = Mesh(np.array([*jax.devices()[: half // 2], *jax.devices()[-(half // 2) :]]), ("expert",))
    a = place(make_inputs(64, 48, 32, 8, 2, dtype="bfloat16"), mesh)
    layer = lambda *a: mok.local_moe(*a, config=CPU)  # noqa: E731
    try:
        local_program(mesh, layer)(*a[:4])
    except NotImplementedError as error:
        refusal = str(error)
    else:
        refusal = ""
    with jax.set_mesh(mesh):
        y = digest(local_program(mesh, layer)(*a[:4]))
    report(output, {"refusal": refusal, "y": y})


CONFIG = mok.MoEConfig(backend="cpu", timeout_s=2.5, first_call_timeout_s=100)


class Steps:
    """Forward and backward calls of one program, at whose start and in whose middle ``act`` runs on the host."""

    def __init__(self, act: Callable[[int, str], None]) -> None:
        def step(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            x = on_host(lambda rank: act(rank, "forward"), x)
            y, pull = jax.vjp(lambda x: mok.local_moe(x, ids, weights, experts, config=CONFIG), x)
            dy = on_host(lambda rank: act(rank, "backward"), jnp.ones_like(y), y)
            return y, pull(dy)[0]

        mesh = Mesh(np.array(jax.devices()), ("expert",))
        self._args = place(make_inputs(48, 48, 32, 12, 2, dtype="bfloat16", seed=4), mesh)[:4]
        by_rank = P("expert")
        specs = (by_rank, by_rank, by_rank, mok.Experts(by_rank, by_rank, by_rank))
        self._run = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(by_rank, by_rank), check_vma=False)
        )

    def __call__(self) -> dict[str, Any]:
        """What came of a step: a digest of this process's part of the result, or the error, and how long it took."""
        start = time.monotonic()
        try:
            with mok.typed_errors():
                parts = [np.asarray(s.data) for a in self._run(*self._args) for s in a.addressable_shards]
        except mok.MoEError as error:
            found = {"error": type(error).__name__, "message": str(error)}
        else:
            found = {"digest": hashlib.sha256(b"".join(a.tobytes() for a in parts)).hexdigest()}
        return {**found, "seconds": time.monotonic() - start}


def start_another_job(output: str, number: int, count: int) -> None:
    """With these processes, each of which calls this, as process ``number`` of ``count``."""
    meeting = Path(output, "address")
    if number == 0:
        meeting.with_suffix(".new").write_text(f"127.0.0.1:{free_port()}")
        meeting.with_suffix(".new").rename(meeting)
    while not meeting.exists():
        time.sleep(0.05)
    jax.distributed.shutdown()
    jax.extend.backend.clear_backends()
    # The launcher has the service of its own job only: process 0 serves this one, and must leave it last.
    os.environ.pop("JAX_COORDINATOR_BIND_ADDRESS")
    jax.config.update("jax_enable_recoverability", False)
    jax.distributed.initialize(meeting.read_text(), count, number)


def killed(output: str, victim: str, stage: str) -> None:
    """A rank's process is killed in the second step. The others say so, and so says every later call, until they start
    a job without it."""
    me, count = jax.process_index(), jax.process_count()
    found: list[Any] = []

    def act(rank: int, now: str) -> None:
        if len(found) == 1 and rank == int(victim) and now == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    step = Steps(act)
    for _ in range(3):
        found.append(step())
    start_another_job(output, me - (me > int(victim)), count - 1)
    found.append(Steps(lambda rank, now: None)())
    Path(output, f"{me}.json").write_text(json.dumps(found))
    multihost_utils.sync_global_devices("the end")
    sys.exit(7)


def late(output: str) -> None:
    """Process 1 is late: for the first call, which peers wait for longer, then for a later one. It comes in time for
    the call after that, and leaves out the last one. Then the processes start another job."""
    me = jax.process_index()
    step, found = Steps(lambda rank, now: None), []
    for number in range(5):
        time.sleep({(1, 0): 4.0, (1, 2): 5.5, (0, 3): 4.0}.get((me, number), 0.0))
        if (me, number) != (1, 4):  # "an error before its call"
            found.append(step())
    start_another_job(output, me, jax.process_count())
    found.append(Steps(lambda rank, now: None)())
    report(output, found)
    multihost_utils.sync_global_devices("the end")


def beside(output: str) -> None:
    """A bad id in one of two groups of a process. Devices have numbers with gaps between processes."""
    from test_faults import data_parallel_program

    good, bad = (make_inputs(64, 48, 32, 8, 2, dtype="bfloat16") for _ in range(2))
    bad.ids[-1, 1] = 8
    run, found = data_parallel_program(2, mok.MoEConfig(), gradients=False, devices=jax.local_devices()), []
    for inputs in (good, bad, good, good):
        try:
            found.append("nan" if np.isnan(run(inputs)).any() else "finite")
        except mok.MoEError as error:
            found.append(type(error).__name__)
    report(output, found)


SCENARIOS = {f.__name__: f for f in (layer, ambiguous, killed, late, beside)}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])

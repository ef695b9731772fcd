"""Times programs against each other in one run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.progress import track

from jax_mok import backends

_WARM_CALLS = 2
LEAST_ROUNDS = 5
_RELEVANT = 300  # characters of a failure's reason


class Program(NamedTuple):
    """Compiled and bound to its arguments.

    - ``call``: starts the work and returns what stands for its result, ready or not.
    - ``wait``: until what ``call`` returned is ready.
    - ``to_jax``: what ``call`` returned, as JAX arrays.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    to_jax: Callable[[Any], Any] = lambda result: result


class Plan(NamedTuple):
    """- ``rounds``: at most; each times every program once.
    - ``max_seconds``: no round starts later, but for the first five.
    - ``block_seconds``: a program is called again and again for about this long and the block is timed; 0 = one call.
    - ``seed``: of the order of the programs in a round.
    """

    rounds: int
    max_seconds: float
    block_seconds: float
    seed: int


class Samples(NamedTuple):
    """Of one program: seconds per call of each block, and the GPU's SM clock in MHz while it ran (empty if unknown)."""

    seconds: list[float]
    sm_mhz: list[int]

    def percentiles_ms(self) -> tuple[float, float, float]:
        """The 10th, the median and the 90th, over blocks."""
        p10, median, p90 = 1e3 * np.percentile(self.seconds, (10, 50, 90))
        return float(p10), float(median), float(p90)

    def median_mhz(self) -> float | None:
        return float(np.median(self.sm_mhz)) if self.sm_mhz else None


def reason(error: BaseException) -> str:
    """One line of what failed: messages of XLA and torch run over pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_RELEVANT]}{'...' if len(text) > _RELEVANT else ''}"


def time_programs(programs: Mapping[Any, Program], plan: Plan, mesh: Mesh) -> tuple[dict[Any, Samples], dict[Any, str]]:
    """Times the programs block by block, each round in a new random order, so that drift of the machine's clock or load
    falls on all of them alike. Returns samples, and reasons for programs that failed on the way."""
    failures: dict[Any, str] = {}
    calls: dict[Hashable, int] = {}
    clock = _sm_clock(mesh)
    for key, program in programs.items():
        try:
            calls[key] = _calls_per_block(program, plan.block_seconds)
        except Exception as error:
            failures[key] = reason(error)
    samples = {key: Samples([], []) for key in calls}
    order, shuffle = list(calls), random.Random(plan.seed)
    began = time.perf_counter()
    for done in track(range(plan.rounds), "timing", transient=True):
        if done >= LEAST_ROUNDS and time.perf_counter() - began > plan.max_seconds:
            break
        shuffle.shuffle(order)
        for key in [k for k in order if k not in failures]:
            try:
                _block(programs[key], calls[key], clock, samples[key])
            except Exception as error:
                failures[key] = reason(error)
    return {key: found for key, found in samples.items() if key not in failures}, failures


def _calls_per_block(program: Program, block_seconds: float) -> int:
    seconds = 0.0
    for _ in range(_WARM_CALLS):
        start = time.perf_counter()
        program.wait(program.call())
        seconds = time.perf_counter() - start
    return max(1, round(block_seconds / seconds))


def _block(program: Program, calls: int, clock: Callable[[], int] | None, into: Samples) -> None:
    start = time.perf_counter()
    running = program.call()
    for _ in range(calls - 1):  # one call ahead keeps the device busy, and no more results in memory than two
        before, running = running, program.call()
        program.wait(before)
    if clock is not None:
        into.sm_mhz.append(clock())  # while the device works
    program.wait(running)
    into.seconds.append((time.perf_counter() - start) / calls)


def _sm_clock(mesh: Mesh) -> Callable[[], int] | None:
    """Reads the SM clock of the mesh's first GPU in MHz; ``None`` without NVIDIA's management library for Python."""
    if backends.platform_of(mesh) != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(mesh.devices.flat[0].local_hardware_id)
        nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
    except nvml.NVMLError:
        return None
    return lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)


class Matmul(NamedTuple):
    """A dense matmul for scale: on one virtual CPU device, which has all cores; on every GPU."""

    program: Program
    name: str
    flop: int


def matmul(mesh: Mesh, seed: int) -> Matmul:
    """float32 on a CPU and bfloat16 on a GPU: what the kernels multiply in; large enough to fill the device."""
    cpu = backends.platform_of(mesh) == "cpu"
    dtype, size, copies = ("float32", 1536, 1) if cpu else ("bfloat16", 8192, mesh.size)
    a = jax.random.normal(jax.random.key(seed), (copies, size, size), jnp.dtype(dtype))
    by_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    a = jax.device_put(a, mesh.devices.flat[0] if cpu else by_device)
    program = jax.jit(lambda a: jnp.matmul(a, a.mT))
    return Matmul(Program(functools.partial(program, a)), f"{dtype} {size}^3", 2 * copies * size**3)

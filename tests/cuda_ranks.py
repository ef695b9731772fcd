"""Several EP ranks on one GPU: each has a seat, a stream and a share of the multiprocessors. The kernels, arenas, flags
and deadlines are those of several GPUs; only the link between them is the GPU's own memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import runtime
from jax_mok.runtime import cuda


def _check(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


class Ranks:
    """Ranks of one group. ``multiprocessors`` of each rank: an even share of the GPU's, unless given."""

    def __init__(self, ranks: int, multiprocessors: int | None = None):
        from cuda.bindings import driver

        self.driver = driver
        _check(driver.cuInit(0))
        context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(0))))
        driver.cuCtxSetCurrent(context)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        all_of_them = _check(driver.cuDeviceGetAttribute(attribute, _check(driver.cuDeviceGet(0))))
        self.ranks = ranks
        self.multiprocessors = multiprocessors or all_of_them // ranks // 2 * 2
        self.seats = runtime.native().CudaSeats([0] * ranks)
        self.streams = [_check(driver.cuStreamCreate(1)) for _ in range(ranks)]
        self.generation = 0

    def call(self, inputs, *, capacity=None, timeout_s=20.0, absent=(), group=0):
        """A call that is ready to run: ``inputs`` are those of the whole batch, split among the ranks."""
        return Call(self, inputs, capacity=capacity, timeout_s=timeout_s, absent=absent, group=group)

    def wait(self):
        for stream in self.streams:
            _check((*self.driver.cuStreamSynchronize(stream), None))

    def failures(self):
        """(code, rank, value, extra) of each seat, and forgets them."""
        return [tuple(self.seats.take_failure(s)) for s in range(self.ranks)]


class Call:
    def __init__(self, of: Ranks, inputs, *, capacity, timeout_s, absent, group):
        x, ids, weights, experts, shared = inputs[:5]
        P = of.ranks
        self.of, self.timeout_s, self.absent = of, timeout_s, absent
        T, (E, H, inter), K = x.shape[0] // P, experts.gate.shape, ids.shape[1]
        width = 0 if shared is None else shared.gate.shape[1]
        rows = T * P * K if capacity is None else capacity
        self.shape = [P, E, K, 2, T, H, inter, width, rows]
        of.seats.reserve(self.shape)
        self.kernels = cuda.load(H, inter, K, width)
        workspace = runtime.native().cuda_workspace_bytes(self.shape)

        def poisoned(*shape, dtype):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return jax.lax.bitcast_convert_type(
                jnp.full((size // np.dtype(dtype).itemsize, np.dtype(dtype).itemsize), 255, jnp.uint8), dtype
            ).reshape(shape)

        self.buffers = []
        for r in range(P):
            mine = slice(r * T, (r + 1) * T)
            local = slice(r * (E // P), (r + 1) * (E // P))
            some = shared or experts
            self.buffers.append(
                [
                    jnp.array([r, group], jnp.int32),
                    *map(jnp.array, (x[mine], ids[mine], weights[mine])),
                    *(jnp.array(w[local]) for w in experts),
                    *map(jnp.array, some),
                    poisoned(T, H, dtype=jnp.bfloat16),
                    jnp.full(E, -7, jnp.int32),
                    jnp.full(P, -7, jnp.int32),
                    jnp.full((), -7, jnp.int32),
                    jnp.full(workspace, 255, jnp.uint8),
                ]
            )
        jax.block_until_ready(self.buffers)
        self.addresses = [[b.unsafe_buffer_pointer() for b in buffers] for buffers in self.buffers]

    def launch(self, order=None):
        self.of.generation += 1
        for r in range(self.of.ranks) if order is None else order:
            if r in self.absent:
                continue
            error = self.of.seats.launch_forward(
                int(r),
                self.of.generation,
                self.kernels,
                self.shape,
                self.timeout_s,
                self.addresses[r],
                int(self.of.streams[r]),
                self.of.multiprocessors,
            )
            assert error == 0, error
        return self

    def run(self, order=None):
        """Launches and waits. Returns y of all ranks, whole, and (tokens_per_expert, rows_per_rank, status) by rank."""
        self.launch(order)
        self.of.wait()
        return self.results()

    def results(self):
        fresh = [
            [jnp.copy(a) for a in b[10:14]] for b in self.buffers
        ]  # an array that was read once is kept on the host
        y = np.concatenate([np.array(b[0]) for b in fresh])
        return y, [tuple(np.array(a) for a in b[1:]) for b in fresh]

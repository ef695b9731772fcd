"""Several EP ranks on one GPU: each has a seat, a stream and a share of the multiprocessors. The kernels, arenas, flags
and deadlines are those of several GPUs; only the link between them is the GPU's own memory. JAX runs nothing here."""

from __future__ import annotations

import weakref

import jax.numpy as jnp
import numpy as np

from jax_mok import runtime
from jax_mok.runtime import cuda


def routes(T, K, E):
    """Ids of T tokens by name; None: at random, with some -1."""
    rng = np.random.default_rng(T)
    return {
        "spread": None,
        "none": np.full((T, K), -1),
        "one expert": np.full((T, K), E - 1),
        "first rank only": rng.integers(0, E // 4, (T, K)),
        "even experts": rng.integers(0, E // 2, (T, K)) * 2,
        "one slot": np.where(np.arange(T * K).reshape(T, K) == T * K - 1, 3, -1),
    }


def check(result):
    """What a function of the driver returned, without the error that there must not be."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def enter(device: int):
    """Makes a GPU's primary context, which JAX uses too, that of this thread; the GPU's handle."""
    from cuda.bindings import driver

    check(driver.cuInit(0))
    handle = check(driver.cuDeviceGet(device))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(handle))))
    return handle


class Buffer:
    """A GPU array in memory of its own, so that compute-sanitizer knows where it ends; all NaN unless given."""

    def __init__(self, shape, dtype, values=None):
        from cuda.bindings import driver

        self.driver, self.shape, self.dtype = driver, tuple(shape), np.dtype(dtype)
        self.bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.address = int(check(driver.cuMemAlloc(max(self.bytes, 1))))
        weakref.finalize(self, driver.cuMemFree, self.address)
        if values is None:
            check(driver.cuMemsetD8(self.address, 255, self.bytes))
        else:
            check(driver.cuMemcpyHtoD(self.address, values.ctypes.data, self.bytes))

    @classmethod
    def of(cls, values):
        values = np.ascontiguousarray(values)
        return cls(values.shape, values.dtype, values)

    def numpy(self):
        found = np.empty(self.shape, self.dtype)
        check(self.driver.cuMemcpyDtoH(found.ctypes.data, self.address, self.bytes))
        return found


class Ranks:
    """Ranks of one group. ``multiprocessors`` of each rank: an even share of the GPU's, unless given."""

    def __init__(self, ranks: int, multiprocessors: int | None = None):
        from cuda.bindings import driver

        device = enter(0)

        def attribute(name):
            key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return check(driver.cuDeviceGetAttribute(key, device))

        self.driver, self.ranks = driver, ranks
        self.capability = ".".join(str(attribute(f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR"))
        self.multiprocessors = multiprocessors or attribute("MULTIPROCESSOR_COUNT") // ranks // 2 * 2
        self.seats = runtime.native().CudaSeats([0] * ranks)
        self.streams = [check(driver.cuStreamCreate(1)) for _ in range(ranks)]
        self.generation = 0
        self.acknowledged = None  # the last failure that is known; None: all that there were

    def call(self, inputs, **options):
        """A call that is ready to run: ``inputs`` are those of the whole batch, split among the ranks."""
        return Forward(self, inputs, **options)

    def gradients(self, inputs, **options):
        """The same of a backward call; ``saved``: the forward call that has kept residuals."""
        return Backward(self, inputs, **options)

    def wait(self):
        for stream in self.streams:
            check(self.driver.cuStreamSynchronize(stream))

    def failures(self):
        """(code, rank, value, extra) of each seat, and forgets them."""
        return [tuple(self.seats.take_failure(s)) for s in range(self.ranks)]


class _Call:
    kernel: str

    def __init__(
        self,
        of,
        inputs,
        *,
        capacity=None,
        timeout_s=20.0,
        absent=(),
        group=0,
        save=False,
        saved=None,
        weight_grads=jnp.bfloat16,
    ):
        enter(0)  # JAX may have left this thread in another GPU's context
        x, ids, weights, experts, shared, dy = inputs
        P = of.ranks
        self.of, self.timeout_s, self.absent, self.save, self.saved = of, timeout_s, absent, save, saved
        self.weight_grads = weight_grads
        T, (E, H, inter), K = x.shape[0] // P, experts.gate.shape, ids.shape[1]
        self.has_shared = shared is not None
        width = shared.gate.shape[1] if self.has_shared else 0
        rows = T * P * K if capacity is None else capacity
        self.shape = [P, E, K, 2, T, H, inter, width, rows]
        of.seats.reserve(self.shape)
        build = (save or saved is not None, weight_grads == jnp.float32)
        self.kernels = cuda.load_on((0,), of.capability, self.kernel, H, inter, K, width, *build)
        self.buffers = []
        for r in range(P):
            mine = slice(r * T, (r + 1) * T)
            local = slice(r * (E // P), (r + 1) * (E // P))
            operands = [
                Buffer.of(np.array([r, group], np.int32)),
                *map(Buffer.of, (x[mine], ids[mine], weights[mine])),
                *(Buffer.of(w[local]) for w in experts),
                *map(Buffer.of, shared or experts),
            ]
            self.buffers.append(operands + self.results_and_workspace(r, operands, Buffer.of(dy[mine])))
        check(of.driver.cuCtxSynchronize())
        self.addresses = [[0 if b is None else b.address for b in bs] for bs in self.buffers]

    def results_and_workspace(self, rank, operands, dy) -> list:
        raise NotImplementedError

    def start(self, rank, *args):
        raise NotImplementedError

    def launch(self, order=None):
        self.of.generation += 1
        for r in range(self.of.ranks) if order is None else order:
            if r in self.absent:
                continue
            stream, part = int(self.of.streams[r]), self.of.multiprocessors
            known = self.of.generation - 1 if self.of.acknowledged is None else self.of.acknowledged
            args = (known, self.kernels, self.shape, self.timeout_s, self.addresses[r], stream, part)
            error = self.start(r, self.of.generation, *args)
            assert error == 0, error
        return self

    def run(self, order=None):
        """Launches, waits and returns the results."""
        self.launch(order)
        self.of.wait()
        return self.results()

    def fetch(self, first, last):
        """Results by rank, as numpy."""
        return [[a.numpy() for a in b[first:last]] for b in self.buffers]

    def results(self):
        raise NotImplementedError


class Forward(_Call):
    kernel = "mok_forward"

    def results_and_workspace(self, rank, operands, dy):
        P, E, _, _, T, H, inter, width, _ = self.shape
        rows = runtime.native().cuda_padded_rows(self.shape)
        sizes = [(rows, H), (rows, inter), (rows, inter), (T, max(width, 8)), (T, max(width, 8))]
        return [
            Buffer(dy.shape, jnp.bfloat16),
            *(Buffer(shape, np.int32) for shape in ((E,), (P,), ())),
            Buffer((runtime.native().cuda_workspace_bytes(self.shape, self.save),), np.uint8),
            *(Buffer(size, jnp.bfloat16) if self.save else None for size in sizes),
        ]

    def start(self, rank, *args):
        return self.of.seats.launch_forward(rank, *args)

    def results(self):
        """y of all ranks, whole, and (tokens_per_expert, rows_per_rank, status) by rank."""
        found = self.fetch(10, 14)
        return np.concatenate([r[0] for r in found]), [tuple(r[1:]) for r in found]


class Backward(_Call):
    kernel = "mok_backward"

    def results_and_workspace(self, rank, operands, dy):
        workspace = runtime.native().cuda_backward_bytes(self.shape, self.saved is None)
        return [
            *([None] * 5 if self.saved is None else self.saved.buffers[rank][15:20]),
            dy,
            Buffer(dy.shape, jnp.bfloat16),
            Buffer(operands[3].shape, jnp.float32),
            *(Buffer(w.shape, self.weight_grads) for w in operands[4:10]),
            Buffer((workspace,), np.uint8),
        ]

    def start(self, rank, *args):
        seats = self.of.seats
        launch = seats.launch_backward_f32 if self.weight_grads == jnp.float32 else seats.launch_backward
        return launch(rank, *args)

    def results(self):
        """Gradients of x, the router weights and the experts of all ranks, whole, and of the shared expert by rank."""
        found = self.fetch(16, 24)
        dx, dw, *experts = (np.concatenate([r[i] for r in found]) for i in range(5))
        return dx, dw, experts, [r[5:] for r in found] if self.has_shared else []

"""Work on the GPUs that JAX knows nothing of: cuBLAS and NCCL on streams of their own. JAX's own work would not do, as
it runs all programs of a GPU on one stream, one after the other."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_size_t, c_void_p

import ml_dtypes
import numpy as np
from cuda_ranks import Buffer, check, enter

N = 8192  # of the square matmuls
REDUCED = 1 << 24  # floats a GPU, of the all-reduces
AT_ONCE = 4  # launches before a thread waits for its stream

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_BFLOAT16, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 14, 68, -1  # CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
_NCCL_FLOAT32, _NCCL_SUM = 7, 0


@contextmanager
def foreign_load(gpus):
    """Matmuls on each of these GPUs (CUDA ordinals) and all-reduces over them, from when all are under way to the end
    of the block. Gives the numbers done so far, by name."""
    stop, done = threading.Event(), {}
    with ThreadPoolExecutor(len(gpus) + 1) as threads:
        running = [threads.submit(_multiply, gpu, stop, done, f"matmuls of GPU {gpu}") for gpu in gpus]
        running.append(threads.submit(_all_reduce, gpus, stop, done, "all-reduces"))
        try:
            while len(done) < len(running) and not any(thread.done() for thread in running):
                time.sleep(0.01)
            if not any(thread.done() for thread in running):
                yield done
        finally:
            stop.set()
    for thread in running:
        thread.result()


def _multiply(gpu, stop, done, name):
    stream, blas, handle = _stream(gpu), _Library("cublas"), c_void_p()
    values = np.random.default_rng(0).random((N, N), np.float32).astype(ml_dtypes.bfloat16)
    a, product = Buffer.of(values), Buffer(values.shape, values.dtype)
    blas.cublasCreate_v2(byref(handle))
    blas.cublasSetStream_v2(handle, c_void_p(stream))
    one, zero = byref(c_float(1)), byref(c_float(0))
    operand = c_void_p(a.address), _BFLOAT16, N
    result = c_void_p(product.address), _BFLOAT16, N, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM
    while not stop.is_set():
        for _ in range(AT_ONCE):
            blas.cublasGemmEx(handle, 0, 0, N, N, N, one, *operand, *operand, zero, *result)
        check(a.driver.cuStreamSynchronize(stream))
        done[name] = done.get(name, 0) + AT_ONCE
    blas.cublasDestroy_v2(handle)


def _all_reduce(gpus, stop, done, name):
    nccl, ranks = _Library("nccl"), (c_void_p * len(gpus))()
    nccl.ncclCommInitAll(ranks, len(gpus), (c_int * len(gpus))(*gpus))
    streams = [_stream(gpu) for gpu in gpus]
    sent, received = ([_ones(gpu) for gpu in gpus] for _ in range(2))
    while not stop.is_set():
        for _ in range(AT_ONCE):
            nccl.ncclGroupStart()
            for *arrays, rank, stream in zip(sent, received, ranks, streams, strict=True):
                addresses = (c_void_p(a.address) for a in arrays)
                last = c_size_t(REDUCED), _NCCL_FLOAT32, _NCCL_SUM, c_void_p(rank), c_void_p(stream)
                nccl.ncclAllReduce(*addresses, *last)
            nccl.ncclGroupEnd()
        for stream in streams:
            check(sent[0].driver.cuStreamSynchronize(stream))
        done[name] = done.get(name, 0) + AT_ONCE
    for rank in ranks:
        nccl.ncclCommDestroy(c_void_p(rank))
    assert all((a.numpy() == len(gpus)).all() for a in received)


def _ones(gpu):
    enter(gpu)
    return Buffer.of(np.ones(REDUCED, np.float32))


def _stream(gpu):
    from cuda.bindings import driver

    enter(gpu)
    return int(check(driver.cuStreamCreate(_NON_BLOCKING)))


class _Library:
    """A library of CUDA's whose functions return 0 when all is well."""

    def __init__(self, name):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self.library = ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)

    def __getattr__(self, function):
        def call(*args):
            error = getattr(self.library, function)(*args)
            assert error == 0, f"{function} returned {error}"

        return call

"""Forward and backward calls of odd shapes, launched by the driver without XLA, for a sanitizer to watch:

compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX leaves the GPU alone

from cuda_ranks import Ranks
from layer_cases import Result, assert_accurate, assert_same_bits, make_inputs, oracle

import jax_mok as mok

SHAPES = [(130, 136, 200, 16, 4, 72), (257, 512, 264, 24, 6, 200)]
TIMEOUT_S = 3000  # kernels are slow under a sanitizer


def run(rank, inputs, save) -> Result:
    forward = rank.call(inputs, save=save, timeout_s=TIMEOUT_S)
    y, _ = forward.run()
    backward = rank.gradients(inputs, saved=forward if save else None, timeout_s=TIMEOUT_S)
    dx, dw, experts, shared = backward.run()
    assert rank.failures()[0][0] == 0
    return Result(y, dx, dw, mok.Experts(*experts), mok.Experts(*shared[0]))


def main():
    rank = Ranks(1, multiprocessors=8)  # few blocks: racecheck follows the shared memory of each
    for T, H, I, E, K, shared in SHAPES:
        inputs = make_inputs(T, H, I, E, K, dtype="bfloat16", shared=shared, seed=T)
        saved, recomputed = (run(rank, inputs, save) for save in (True, False))
        assert_accurate(saved, oracle(inputs), "bfloat16")
        assert_same_bits(recomputed, saved)
        print(f"T {T} H {H} I {I} E {E} K {K} shared {shared}: right", flush=True)


if __name__ == "__main__":
    main()

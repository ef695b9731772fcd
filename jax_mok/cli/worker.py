"""One process of ``jax-mok launch``: joins the job, then runs the script as Python would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import jax

from jax_mok import runtime


def main() -> None:
    address, processes, number, devices, script, *args = sys.argv[1:]
    jax.distributed.initialize(
        address, int(processes), int(number), local_device_ids=local_gpus(int(number), int(devices))
    )
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def local_gpus(number: int, devices: int) -> list[int]:
    """Those of process ``number``; if there are fewer than devices in all, processes share them. Without meaning on
    CPUs, where each process has virtual devices of its own."""
    gpus = runtime.native().cuda_devices() if runtime.load_error() is None else 0
    wanted = range(number * devices, (number + 1) * devices)
    return [i % gpus for i in wanted] if gpus else list(wanted)


if __name__ == "__main__":
    main()

"""One process of ``jax-mok launch``: joins the job, then runs the script as Python would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import jax


def main() -> None:
    address, processes, number, devices, script, *args = sys.argv[1:]
    first = int(number) * int(devices)
    jax.distributed.initialize(
        address,
        int(processes),
        int(number),
        local_device_ids=range(
            first, first + int(devices)
        ),  # of GPUs; CPU devices are virtual, each process has its own
    )
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

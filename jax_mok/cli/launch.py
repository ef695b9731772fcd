"""``launch``: one job of several processes on this machine.

The coordination service of ``jax.distributed`` runs here, in the launcher, and not in process 0 as usual: whichever
process ends, the others have the time to say what they were waiting for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jax._src import lib  # the coordination service has no public name

_GRACE_S: Final = 10.0  # for the other processes to end by themselves after one has failed
_TERMINATION_S: Final = 5.0
_HEARTBEAT_S: Final = 100


def launch(processes: int, devices_per_process: int, script: Path, args: Sequence[str]) -> int:
    """Runs the script in every process and returns the exit code of the first that fails, or 0."""
    address = f"127.0.0.1:{free_port()}"
    jaxlib: Any = lib
    service = jaxlib._jax.get_distributed_runtime_service(
        address, processes, heartbeat_timeout=_HEARTBEAT_S, shutdown_timeout=int(_GRACE_S), recoverable=True
    )
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for number in range(processes):
            workers.append(_start(address, number, processes, devices_per_process, script, args))
            readers.append(threading.Thread(target=_forward, args=(number, workers[-1]), daemon=True))
            readers[-1].start()
        code = _first_failure(workers)
        if code:
            _wait(workers, _GRACE_S)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        _end(workers)
    for reader in readers:
        reader.join(timeout=5)
    service.shutdown()
    return code


def _start(
    address: str, number: int, processes: int, devices: int, script: Path, args: Sequence[str]
) -> subprocess.Popen[str]:
    environment = dict(
        os.environ,
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip(),
        JAX_ENABLE_RECOVERABILITY="1",
        JAX_COORDINATOR_BIND_ADDRESS="127.0.0.1:0",  # of a service that process 0 starts in vain
        PYTHONUNBUFFERED="1",
    )
    job = (address, str(processes), str(number), str(devices))
    return subprocess.Popen(
        [sys.executable, "-m", "jax_mok.cli.worker", *job, str(script), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _forward(number: int, worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        sys.stdout.write(f"[{number}] {line}")
        sys.stdout.flush()


def _first_failure(workers: Sequence[subprocess.Popen[str]]) -> int:
    """Waits until one fails or all are done. As shells do: 128 + n for the end by signal n."""
    while True:
        codes = [worker.poll() for worker in workers]
        for number, code in enumerate(codes):
            if code:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                print(f"jax-mok launch: process {number} ended {how}", file=sys.stderr, flush=True)
                return 128 - code if code < 0 else code
        if None not in codes:
            return 0
        time.sleep(0.05)


def _wait(workers: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(0.05)


def _end(workers: Sequence[subprocess.Popen[str]]) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        running = [worker for worker in workers if worker.poll() is None]
        for worker in running:
            worker.send_signal(stop)
        _wait(running, _TERMINATION_S)

"""CUDA kernels, compiled by NVRTC at first use and cached on disk. Needs the ``cuda`` extra, and no GPU.

(A type checker that runs in the source tree takes the folder cuda/ beside the package for the package ``cuda``.)
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

ARCHS = ("sm_90a",)
"""Architectures that have kernels."""

KERNELS = {
    "mok_route": "device/route.cu",
    "mok_forward": "device/sm90/forward.cu",
    "mok_backward": "device/sm90/backward.cu",
}
"""Entry point -> source."""


def source_root() -> Path:
    """The folder of the kernels' sources: inside an installed package, beside it in a source tree."""
    package = Path(__file__).parent.parent
    for root in (package / "cuda", package.parent / "cuda"):
        if (root / "device").is_dir():
            return root
    raise FileNotFoundError("the CUDA sources of jax_mok are missing; reinstall the package")


def cache_dir() -> Path:
    """Where cubins are kept."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("jax_mok")) / "cubins"


def _options(arch: str, macros: dict[str, int], verbose: bool) -> Any:
    from cuda.core import ProgramOptions  # pyright: ignore

    return ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(k, str(v)) for k, v in sorted(macros.items())],
        include_path=[str(source_root())],
        ptxas_options=["-v"] if verbose else None,
    )


def _source(kernel: str) -> str:
    return f'#include "{KERNELS[kernel]}"\n'


def compile_with_log(kernel: str, arch: str, macros: dict[str, int]) -> tuple[bytes, str]:
    """The cubin, freshly compiled, and what ptxas said of its registers and spills."""
    from cuda.core import Program  # pyright: ignore

    log = io.StringIO()
    code = Program(_source(kernel), "c++", _options(arch, macros, verbose=True)).compile("cubin", logs=log)
    return bytes(code.code), log.getvalue()


def cubin(kernel: str, arch: str, macros: dict[str, int]) -> bytes:
    """The cubin of a kernel, from the cache on disk if it is there. The key covers sources, options and NVRTC."""
    from cuda.core.utils import (  # pyright: ignore
        FileStreamProgramCache,
        make_program_cache_key,
    )

    from cuda.core import Program  # pyright: ignore

    options, source = _options(arch, macros, verbose=False), _source(kernel)
    headers = hashlib.sha256()
    for path in sorted(p for p in source_root().rglob("*") if p.suffix in (".h", ".cu")):
        headers.update(path.name.encode() + path.read_bytes())
    key = make_program_cache_key(
        code=source, code_type="c++", options=options, target_type="cubin", extra_digest=headers.digest()
    )
    with FileStreamProgramCache(cache_dir()) as cache:
        found = cache.get(key)
        if found is None:
            found = bytes(Program(source, "c++", options).compile("cubin").code)
            cache[key] = found
    return bytes(found)

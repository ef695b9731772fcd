"""What a lowered or compiled program does with the layer: its foreign calls, and what XLA put around them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jax_mok import runtime

FORWARD = "jax_mok_forward"
BACKWARD = "jax_mok_backward"
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_ELEMENT_BYTES = {"bf16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """One foreign call, on one device of the program.

    ``flops`` counts the matrix products of a balanced batch (``6 T K H I`` forward and twice that backward, per
    routed slot, plus the shared expert; with recomputation backward adds the gate and up products again).
    ``link_bytes`` are the bytes that a rank reads from its peers for such a batch. ``residual_bytes`` is what the
    forward call keeps for the backward call, room for the worst case counted. ``arena_bytes`` is the rank's symmetric
    arena, shared by all calls of the process and outside XLA's memory. ``workspace_bytes`` is XLA's memory that a call
    on a GPU works in; 0 on CPUs. ``weight_grads`` is the dtype of the weights' gradients (of a backward call).
    """

    target: str
    tokens: int
    hidden: int
    inter: int
    shared_inter: int
    experts: int
    top_k: int
    ranks: int
    axis: str
    dtype: str
    weight_grads: str | None
    residuals: str
    max_rows: int
    timeout_s: float
    flops: int
    link_bytes: int
    residual_bytes: int
    arena_bytes: int | None
    workspace_bytes: int

    def __str__(self) -> str:
        shared = f" I_s {self.shared_inter}" if self.shared_inter else ""
        arena = "unknown (native module not built)" if self.arena_bytes is None else f"{self.arena_bytes:,} B"
        space = f", work space {self.workspace_bytes:,} B" if self.workspace_bytes else ""
        grads = "" if self.weight_grads is None else f", weight gradients {self.weight_grads}"
        return (
            f"{self.target}: T {self.tokens} H {self.hidden} I {self.inter}{shared} E {self.experts} K {self.top_k} "
            f"{self.dtype}, EP {self.ranks} over axis {self.axis or '-'!r}\n"
            f"    residuals {self.residuals} ({self.residual_bytes:,} B), capacity {self.max_rows} rows, "
            f"timeout {self.timeout_s:g} s{grads}\n"
            f"    {self.flops / 1e9:,.3f} GFLOP, {self.link_bytes:,} B over the link, arena {arena}{space}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """``calls`` in program order, and how many collectives of each kind the program holds (for a lowered program
    only those written in it; XLA adds the others when it compiles)."""

    calls: tuple[CallInfo, ...]
    collectives: dict[str, int]
    compiled: bool

    def __str__(self) -> str:
        lines = [str(c) for c in self.calls] or ["no jax_mok calls"]
        found = ", ".join(f"{n} x {kind}" for kind, n in self.collectives.items()) or "none"
        lines.append(f"collectives {'in the compiled program' if self.compiled else 'as written'}: {found}")
        return "\n".join(lines)


def inspect(program: Any) -> Report:
    """Lists the layer's foreign calls in a program.

    **Arguments**

    - ``program``: what ``jax.jit(f).lower(...)`` or its ``.compile()`` returns, or the text of either
      (``.as_text()``).

    **Returns** a :class:`Report`; ``print`` it. Figures are per device.

    **Raises** ``TypeError`` for anything else.
    """
    text = program if isinstance(program, str) else getattr(program, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            f"inspect takes jax.jit(f).lower(...), its .compile(), or their text; got {type(program).__name__}."
        )
    compiled = "HloModule" in text
    calls = tuple(filter(None, map(_parse_call, text.splitlines())))
    return Report(calls, _count_collectives(text, compiled), compiled)


def _parse_call(line: str) -> CallInfo | None:
    target = re.search(rf'(?:custom_call_target="|custom_call @)({FORWARD}|{BACKWARD})\b', line)
    if target is None:
        return None
    attributes = {k: v.strip('"') for k, v in re.findall(r'(\w+) = ("[^"]*"|[-+.\de]+)(?: : \w+)?(?=[,}])', line)}
    operands = _operand_shapes(line)
    (dtype, (tokens, hidden)), (_, (_, top_k)) = operands[1], operands[2]
    inter, shared_inter = operands[4][1][-1], operands[7][1][-1]
    # the last result; a call on CPUs needs none
    workspace = re.search(r"u8\[(\d+)\]\S*\) custom-call\(|tensor<(\d+)xui8>\)", line)
    space = 0 if workspace is None else int(workspace[1] or workspace[2])
    return _describe(target[1], dtype, tokens, hidden, inter, shared_inter, top_k, space, attributes)


def _operand_shapes(line: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of the operands, from a line of HLO or of StableHLO."""
    if "operand_layout_constraints={" in line:
        inside = line.split("operand_layout_constraints={", 1)[1]
        found = re.findall(r"(\w+)\[([\d,]*)\]\{", inside)
        return [(t, tuple(map(int, filter(None, dims.split(","))))) for t, dims in found]
    signature = line.rsplit(" : (", 1)[1].split(") -> ", 1)[0]
    shapes = []
    for tensor in re.findall(r"tensor<([^>]*)>", signature):
        *dims, dtype = tensor.split("x")
        shapes.append((dtype, tuple(map(int, dims))))
    return shapes


def _describe(
    target: str,
    dtype: str,
    tokens: int,
    hidden: int,
    inter: int,
    shared_inter: int,
    top_k: int,
    workspace_bytes: int,
    attributes: dict[str, str],
) -> CallInfo:
    ranks, experts, max_rows = (int(attributes[k]) for k in ("ranks", "experts", "max_rows"))
    element, slots = _ELEMENT_BYTES[dtype], tokens * top_k
    backward, saved = target == BACKWARD, int(attributes.get("save", "0")) != 0
    recompute = backward and not saved
    products = 6 if not backward else 12 + (4 if recompute else 0)
    remote = slots * (ranks - 1) // ranks
    # a row each way, and on the way back its gradient of the router weight; routes are negligible
    rows_moved = 2 + (1 if recompute else 0)
    shape = (ranks, experts, top_k, element, tokens, hidden, inter, shared_inter, max_rows)
    native = None if runtime.load_error() else runtime.native()
    rows, arena, of_gpu = 0, None, workspace_bytes > 0
    if native is not None:
        rows = (native.cuda_padded_rows if of_gpu else native.padded_rows)(shape)
        arena = (native.cuda_arena_bytes(shape) if ranks > 1 else 0) if of_gpu else native.arena_bytes(shape)
    kept = 0
    if not backward and saved and native is not None:
        kept = rows * (hidden + 2 * inter) * element + tokens * 2 * shared_inter * element
    return CallInfo(
        target=target,
        tokens=tokens,
        hidden=hidden,
        inter=inter,
        shared_inter=shared_inter,
        experts=experts,
        top_k=top_k,
        ranks=ranks,
        axis=attributes["axis"],
        dtype={"bf16": "bfloat16", "f32": "float32"}[dtype],
        weight_grads=attributes.get("weight_grads"),
        residuals=attributes["residuals"],
        max_rows=max_rows,
        timeout_s=float(attributes["timeout_s"]),
        flops=products * hidden * (slots * inter + tokens * shared_inter),
        link_bytes=remote * (rows_moved * hidden * element + (8 if backward else 0)),
        residual_bytes=kept,
        arena_bytes=arena,
        workspace_bytes=workspace_bytes,
    )


def _count_collectives(text: str, compiled: bool) -> dict[str, int]:
    counts = {}
    for kind in _COLLECTIVES:
        if compiled:
            n = len(re.findall(rf"\s{kind}(?:-start)?\(", text))
        else:
            n = len(re.findall(rf'(?:stablehlo\.|"stablehlo\.){kind.replace("-", "_")}\b', text))
        if n:
            counts[kind] = n
    return counts

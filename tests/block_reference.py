"""The MoE block in float64 numpy, token by token, and the measure of distance that the tests use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def relative_l2(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.linalg.norm(want) > 0
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def softmax(a: np.ndarray) -> np.ndarray:
    a = np.exp(a - a.max(axis=-1, keepdims=True))
    return a / a.sum(axis=-1, keepdims=True)


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def top_ids(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def balancing_loss(probs: np.ndarray, ids: np.ndarray) -> float:
    """Over tokens [T, E] and their chosen experts [T, K], none of them -1."""
    tokens, experts = probs.shape
    loss = 0.0
    for e in range(experts):
        loss += (ids == e).sum() / ids.size * probs[:, e].sum() / tokens
    return experts * loss


def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = x @ gate
    return (g * sigmoid(g) * (x @ up)) @ down


def moe_block(
    weights: Mapping[str, Any],
    x: Any,
    top_k: int,
    router: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[np.ndarray, dict[str, Any]]:
    """``weights`` maps ``router``, ``experts.gate``, ... ``shared.down`` and ``selection_bias`` to arrays."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    tokens = np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1])
    logits = tokens @ w["router"]
    scores = softmax(logits) if router == "softmax" else sigmoid(logits)
    ids = top_ids(scores + w.get("selection_bias", 0), top_k)
    y = np.zeros_like(tokens)
    for t, token in enumerate(tokens):
        chosen = scores[t, ids[t]]
        chosen = scale * (chosen / chosen.sum() if normalize else chosen)
        for e, weight in zip(ids[t], chosen, strict=True):
            y[t] += weight * mlp(token, *(w[f"experts.{m}"][e] for m in ("gate", "up", "down")))
    if "shared.gate" in w:
        y += mlp(tokens, *(w[f"shared.{m}"] for m in ("gate", "up", "down")))
    aux = {
        "load_balancing_loss": balancing_loss(scores / scores.sum(axis=-1, keepdims=True), ids),
        "router_z_loss": np.mean(np.log(np.exp(logits).sum(axis=-1)) ** 2),
        "expert_load": np.bincount(ids.reshape(-1), minlength=logits.shape[-1]),
    }
    return y.reshape(np.shape(x)), aux

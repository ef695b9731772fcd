"""``bench``: every baseline computes our layer, failures are said and do not stop a run, the JSON is what the table
says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mok.cli import baselines, bench, timing, torch_baseline, train_step
from jax_mok.cli.shape import Arrays, Shape
from jax_mok.demo import devices

pytestmark = pytest.mark.usefixtures("quickly_compiled")
ONCE = timing.Plan(rounds=1, max_seconds=60.0, block_seconds=0.0, seed=0)


def shape(ranks: int, dtype: str = "float32", tokens: int = 64) -> Shape:
    return Shape(tokens, hidden=32, inter=16, experts=8, top_k=2, ranks=ranks, dtype=dtype)


def with_missing_experts(arrays: Arrays) -> Arrays:
    """Some slots without an expert, and one token without any."""
    ids = arrays.expert_ids.at[::3, 1].set(-1).at[5].set(-1)
    return arrays._replace(expert_ids=jax.device_put(ids, arrays.expert_ids.sharding))


def emulated_ragged_all_to_all(
    operand: Any, output: Any, starts: Any, sizes: Any, lands_at: Any, received: Any, *, axis_name: str
) -> Any:
    """By its documentation, out of an all-gather: CPUs do not have it."""
    del received
    rank = jax.lax.axis_index(axis_name)
    every, starts, sizes, lands_at = (jax.lax.all_gather(a, axis_name) for a in (operand, starts, sizes, lands_at))
    row = jnp.arange(output.shape[0])
    for peer in range(jax.lax.axis_size(axis_name)):
        offset = row - lands_at[peer, rank]
        chosen = (offset >= 0) & (offset < sizes[peer, rank])
        output = jnp.where(chosen[:, None], every[peer, jnp.where(chosen, starts[peer, rank] + offset, 0)], output)
    return output


def differences(name: str, s: Shape) -> dict[str, float]:
    mesh = devices.expert_mesh(s.ranks)
    ours = bench._ours("cpu", mesh, "save")
    rival = bench.Contender(name, baselines.layer(name, mesh), baseline=True)
    arrays = with_missing_experts(s.random(mesh, seed=1))
    _, found, failed = bench._compile_and_compare([ours, rival], ["fwd+bwd"], arrays)
    assert not failed
    return found[name]


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [("local/xla", 1, "bfloat16"), ("all_gather/xla", 2, "bfloat16"), ("all_gather/xla", 4, "float32")],
)
def test_a_baseline_computes_our_layer_and_its_gradients(name: str, ranks: int, dtype: str):
    found = differences(name, shape(ranks, dtype))
    assert set(found) == {"y", "dx", "d_router_weights", "d_gate", "d_up", "d_down"}
    assert max(found.values()) <= bench._TOLERANCE[dtype], found


def test_all_to_all_sends_every_row_to_its_expert_and_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    found = differences("all_to_all/xla", shape(4))
    assert max(found.values()) <= bench._TOLERANCE["float32"], found


@pytest.mark.parametrize("move", ["all_gather", "all_to_all"])
def test_a_baseline_drops_no_row_in_silence(move: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    s, mesh = shape(4), devices.expert_mesh(4)
    arrays = s.random(mesh, seed=0)
    assert baselines.overflow(mesh, arrays.expert_ids, s.experts) is None
    crowded = jnp.zeros_like(arrays.expert_ids)
    assert "128 rows and has room for 48" in (baselines.overflow(mesh, crowded, s.experts) or "")
    y = jax.jit(baselines.layer(f"{move}/xla", mesh))(arrays.x, crowded, arrays.router_weights, arrays.experts)
    assert np.isnan(np.asarray(y)).all()


def test_what_cannot_run_here_says_why():
    mesh = devices.expert_mesh(2)
    selection = bench.select(mesh, None, None, "save")
    assert [c.name for c in selection.contenders] == ["cpu", "reference", "xla", "all_gather/xla"]
    assert set(selection.not_timed) == {"all_gather/tokamax", "all_to_all/xla", "all_to_all/tokamax", "torch"}
    assert "ragged_all_to_all" in selection.not_timed["all_to_all/xla"]


def test_torch_is_not_imported_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_baseline.refusal(devices.expert_mesh(1)) == "needs an NVIDIA GPU"


@pytest.mark.gpu
def test_every_baseline_of_one_gpu_computes_our_layer(tmp_path: Path):
    s, mesh = Shape(512, 512, 256, experts=8, top_k=2, ranks=1, dtype="bfloat16"), devices.expert_mesh(1)
    result = bench.run(s, mesh, bench.select(mesh, None, None, "save"), ["fwd", "fwd+bwd"], ONCE, "save", tmp_path)
    assert result.good, result
    assert set(result.odd) <= {"local/tokamax"}  # its weight gradients miss a row or two of each expert (0.0.17)
    assert not result.failures


def test_the_same_program_is_not_timed_twice():
    selection = bench.select(devices.expert_mesh(1), None, None, "save")
    assert [c.name for c in selection.contenders] == ["cpu", "reference", "xla"]
    assert "backend xla" in selection.not_timed["local/xla"]


def selection_with(mesh: Any, *broken: bench.Contender) -> bench.Selection:
    chosen = bench.select(mesh, ["cpu"], ["all_gather/xla", "all_to_all/xla"], "save")
    return bench.Selection([*chosen.contenders, *broken], chosen.not_timed)


def out_of_memory(*args: Any) -> jax.Array:
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a page about it")


@pytest.mark.parametrize("baseline", [True, False])
def test_a_failure_is_reported_and_the_run_goes_on(baseline: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    s, mesh = shape(2), devices.expert_mesh(2)
    selection = selection_with(mesh, bench.Contender("broken", out_of_memory, baseline))
    result = bench.run(s, mesh, selection, ["fwd"], ONCE, "save", tmp_path)
    assert [(f.contender, f.of) for f in result.failures] == [("broken", "fwd")]
    assert {t.contender for t in result.timings} == {"cpu", "all_gather/xla"}
    assert result.good is baseline
    said = " ".join(capsys.readouterr().out.split())
    assert "broken fwd failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory and a page about it" in said
    assert "all_to_all/xla not timed: XLA has no ragged_all_to_all on CPUs." in said


def test_a_program_that_fails_while_timed_leaves_the_others_their_times():
    calls = iter(range(4))

    def fails_later() -> jax.Array:
        if next(calls) == 3:
            raise RuntimeError("gone")
        return jnp.zeros(())

    programs = {"good": timing.Program(lambda: jnp.zeros(())), "bad": timing.Program(fails_later)}
    samples, failed = timing.time_programs(programs, ONCE._replace(rounds=5), devices.expert_mesh(1))
    assert failed == {"bad": "RuntimeError: gone"}
    assert list(samples) == ["good"]
    assert len(samples["good"].seconds) == 5


def test_blocks_last_as_long_as_asked():
    program = timing.Program(lambda: jnp.zeros(()))
    calls = timing._calls_per_block(program, 0.05)
    assert calls > 10
    assert timing._calls_per_block(program, 0.0) == 1


def test_a_wrong_result_fails_the_run(tmp_path: Path):
    s, mesh = shape(2), devices.expert_mesh(2)
    wrong = bench.Contender("wrong", lambda x, ids, weights, experts: 1.1 * x, baseline=True)
    alone = bench.Selection([bench.select(mesh, ["cpu"], [], "save").contenders[0], wrong], {})
    result = bench.run(s, mesh, alone, ["fwd"], ONCE, "save", tmp_path)
    assert result.odd == ["wrong"]
    assert not result.agrees
    assert not result.good


@pytest.mark.parametrize("baseline", [True, False])
def test_a_wrong_baseline_is_told_from_a_wrong_layer(baseline: bool, tmp_path: Path):
    """By another baseline, which agrees with the layer."""
    s, mesh = shape(2), devices.expert_mesh(2)
    wrong = bench.Contender("wrong", lambda x, ids, weights, experts: jnp.nan * x, baseline)
    result = bench.run(s, mesh, selection_with(mesh, wrong), ["fwd"], ONCE, "save", tmp_path)
    assert result.odd == ["wrong"]
    assert result.good is baseline


def test_the_json_has_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    s, mesh = shape(2, "bfloat16"), devices.expert_mesh(2)
    result = bench.run(s, mesh, selection_with(mesh), ["fwd", "fwd+bwd"], ONCE, "save", tmp_path)
    said, found = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    assert result.good
    assert found["best_of_others"] == {"fwd": "all_gather/xla", "fwd+bwd": "all_gather/xla"}
    assert [(t["of"], t["contender"]) for t in found["timings"]] == [
        (of, name) for of in ("fwd", "fwd+bwd") for name in ("cpu", "all_gather/xla")
    ]
    for t in found["timings"]:
        assert any(
            all(word in line for word in (t["contender"], bench.ms(t["median_ms"]))) for line in said.split("\n")
        )
        flop = bench._FLOP_OF_FORWARD[t["of"]] * s.forward_flop
        assert t["gflops"] == pytest.approx(flop / t["median_ms"] / 1e6)
        assert t["percent_of_matmul"] == pytest.approx(100 * t["gflops"] / found["matmul_gflops"])
    best = {t["of"]: t["median_ms"] for t in found["timings"] if t["contender"] == "all_gather/xla"}
    assert all(t["speedup"] == pytest.approx(best[t["of"]] / t["median_ms"]) for t in found["timings"])
    assert (tmp_path / "bench.png").stat().st_size > 0


def test_a_hot_expert_makes_its_rank_busy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    s, mesh = Shape(8192, 8, 8, experts=16, top_k=8, ranks=2, dtype="float32", hot_expert=7), devices.expert_mesh(2)
    rows = np.bincount(np.asarray(s.random(mesh, seed=0).expert_ids).ravel(), minlength=16)
    np.testing.assert_allclose(rows / (s.tokens * s.top_k), np.r_[7, np.ones(15)] / 22, rtol=0.1)
    result = bench.run(s, mesh, selection_with(mesh), ["fwd"], ONCE, "save", tmp_path)
    assert result.good
    assert result.busiest_rank == pytest.approx(14 / 11, rel=0.01)
    assert "The busiest rank has x 1.27 of the balanced rows." in " ".join(capsys.readouterr().out.split())


def test_a_training_step_takes_the_same_step_with_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    s, mesh = shape(2, "bfloat16", tokens=256), devices.expert_mesh(2)
    broken = bench.Contender("broken", out_of_memory, baseline=True)
    result = train_step.run(s, mesh, selection_with(mesh, broken), ONCE, tmp_path)
    assert result.good
    said, found = capsys.readouterr().out, json.loads((tmp_path / "train.json").read_text())
    assert [t["contender"] for t in found["timings"]] == ["cpu", "all_gather/xla"]
    assert all(t["tokens_per_s"] == pytest.approx(1e3 * s.tokens / t["median_ms"]) for t in found["timings"])
    assert [f["contender"] for f in found["failures"]] == ["broken"]
    assert "tokens/s" in said

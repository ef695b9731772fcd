"""The demo: the same data, the same bits, a resume that changes nothing, and a report that notices when not."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jax_mok.demo import corpus, determinism, devices
from jax_mok.demo.loop import Trainer
from jax_mok.demo.run import Report, run
from jax_mok.demo.settings import ModelConfig, Plan, Settings, SettingsError

FRAMEWORKS = ("flax", "equinox")
TINY = Settings(
    model=ModelConfig(layers=1, hidden=16, heads=2, inter=16, experts=8, sequence=16),
    batch=8,
    devices=4,
    learning_rate=1e-2,
    warmup=1,
    corpus_bytes=100_000,
)


@functools.cache
def trainer(framework: str) -> Trainer:
    settings = dataclasses.replace(TINY, framework=framework)
    mesh = devices.expert_mesh(settings.devices)
    build = importlib.import_module(f"jax_mok.demo.model_{framework}").build
    return Trainer(build(settings.model, mesh, settings.seed), mesh, settings)


def train(plan: Plan, framework: str = "flax") -> tuple[Report, str]:
    said = io.StringIO()
    return run(trainer(framework), plan, Console(file=said, width=120)), said.getvalue()


def test_corpus_is_the_same_every_time():
    first, second = corpus.load(200_000), corpus.load(200_000)
    assert len(first) == 200_000
    assert first.tobytes() == second.tobytes()
    assert corpus.load(1000).tobytes() == first[:1000].tobytes()


def test_corpus_order_is_that_of_relative_paths(tmp_path: Path):
    for name, text in {"b.py": "B", "a/z.py": "A", "site-packages/c.py": "no", "d.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert corpus.load(10, tmp_path).tobytes() == b"AB"


def test_corpus_says_when_there_is_none(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"\*\.py"):
        corpus.load(10, tmp_path)


def test_batches_are_a_function_of_seed_and_step():
    text = corpus.load(10_000)
    a = corpus.batch(text, seed=1, step=2, size=3, sequence=5)
    assert a.shape == (3, 6)
    np.testing.assert_array_equal(a, corpus.batch(text, 1, 2, 3, 5))
    assert not np.array_equal(a, corpus.batch(text, 1, 3, 3, 5))
    assert not np.array_equal(a, corpus.batch(text, 2, 2, 3, 5))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(framework: str, tmp_path: Path):
    whole = Plan(20, tmp_path / "whole", replay="scratch")
    expected, said = train(whole, framework)
    assert expected.failures == []
    assert expected.repeats
    assert expected.replay_from == 0
    assert expected.losses[-1] < 0.8 * expected.losses[0]
    assert "same bits" in said
    assert json.loads((whole.output / "report.json").read_text())["params_digest"] == expected.params_digest
    assert (whole.output / "loss.png").stat().st_size > 0

    parts = Plan(20, tmp_path / "parts")
    train(dataclasses.replace(parts, steps=8), framework)
    resumed, said = train(dataclasses.replace(parts, resume=True), framework)
    assert "resumed after step 8" in said
    assert resumed.params_digest == expected.params_digest
    assert resumed.losses == expected.losses
    assert resumed.repeats
    assert resumed.replay_from > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parameters_are_float32_and_experts_are_spread(framework: str):
    leaves = jax.tree.leaves(trainer(framework).init().params)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)
    experts = [leaf for leaf in leaves if leaf.ndim == 3]
    assert len(experts) == 3
    for leaf in experts:
        assert leaf.shape[0] == TINY.model.experts
        assert leaf.addressable_shards[0].data.shape[0] == TINY.model.experts // TINY.devices


def test_digest_sees_one_bit_and_names():
    a = {"w": np.zeros(4, np.float32)}
    b = {"w": np.zeros(4, np.float32)}
    assert determinism.digest(a) == determinism.digest(b)
    b["w"].view(np.uint32)[3] = 1
    assert determinism.digest(a) != determinism.digest(b)
    assert determinism.digest(a) != determinism.digest({"v": a["w"]})


def test_report_names_each_broken_promise():
    good = Report([1.0], "a", "a", 0, {1: {"dx": "x"}, 2: {"dx": "x"}}, native=True, seconds=1.0)
    assert good.failures == []
    assert "two runs" in dataclasses.replace(good, replay_digest="b").failures[0]
    uneven = {1: {"dx": "x"}, 2: {"dx": "y"}}
    assert "EP sizes" in dataclasses.replace(good, gradient_digests=uneven).failures[0]
    assert dataclasses.replace(good, gradient_digests=uneven, native=False).failures == []


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    keep = tmp_path / "checkpoints" / "precious"
    keep.write_text("x")
    with pytest.raises(SettingsError, match="not written by this demo"):
        train(Plan(4, tmp_path))
    assert keep.exists()


def test_resume_refuses_what_it_cannot_continue(tmp_path: Path):
    plan = Plan(4, tmp_path, resume=True)
    with pytest.raises(SettingsError, match="no run to resume"):
        train(plan)
    (tmp_path / "run.json").write_text(json.dumps({**dataclasses.asdict(TINY), "seed": 7}))
    with pytest.raises(SettingsError, match="seed: 7 then, 0 now"):
        train(plan)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 6}, "multiple of 4"),
        ({"devices": 3, "batch": 9}, "divides 8"),
        ({"warmup": 0}, "at least 1"),
        ({"framework": "torch"}, "'flax', 'equinox'"),
        ({"learning_rate": float("nan")}, "finite"),
    ],
)
def test_settings_refuse_what_cannot_run(change: dict, said: str):
    with pytest.raises(SettingsError, match=said):
        dataclasses.replace(TINY, **change)

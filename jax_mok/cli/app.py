"""The commands and their options. Each imports what it needs when it runs, so that ``doctor`` works without the
packages of ``demo``."""

from __future__ import annotations

import importlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Framework(StrEnum):
    FLAX = "flax"
    EQUINOX = "equinox"


class Replay(StrEnum):
    CHECKPOINT = "checkpoint"
    SCRATCH = "scratch"


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Residuals(StrEnum):
    SAVE = "save"
    RECOMPUTE = "recompute"


class Backend(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"
    XLA = "xla"
    REFERENCE = "reference"


class Baseline(StrEnum):
    LOCAL_XLA = "local/xla"
    LOCAL_TOKAMAX = "local/tokamax"
    ALL_GATHER_XLA = "all_gather/xla"
    ALL_GATHER_TOKAMAX = "all_gather/tokamax"
    ALL_TO_ALL_XLA = "all_to_all/xla"
    ALL_TO_ALL_TOKAMAX = "all_to_all/tokamax"
    TORCH = "torch"


class Passes(StrEnum):
    FORWARD = "fwd"
    GRADIENT = "fwd+bwd"
    BOTH = "both"

    def names(self) -> list[Literal["fwd", "fwd+bwd"]]:
        return ["fwd", "fwd+bwd"] if self is Passes.BOTH else [self.value]


Devices = Annotated[int, typer.Option(min=1, help="EP ranks; virtual CPU devices where there are no GPUs.")]
Output = Annotated[Path, typer.Option(file_okay=False, help="Directory for what the command writes.")]


@app.callback()
def about() -> None:
    """Fused, deterministic mixture-of-experts layers for JAX."""


@app.command()
def doctor() -> None:
    """Says what this machine can run, and why not the rest. Exit code 0 if the layer runs natively, 1 otherwise."""
    from jax_mok.cli.doctor import examine

    raise typer.Exit(0 if examine() else 1)


@app.command()
def demo(
    framework: Framework = Framework.FLAX,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps, those before a resume included.")] = 240,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="EP ranks. Default: up to eight of the GPUs, or eight virtual CPU devices."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Default: runs/demo-FRAMEWORK.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output directory.")] = False,
    replay: Annotated[
        Replay, typer.Option(help="Where the second run, for the comparison, starts.")
    ] = Replay.CHECKPOINT,
    backend: Backend = Backend.AUTO,
    seed: int = 0,
) -> None:
    """Trains a small byte-level MoE transformer twice and compares the results bit by bit, in about two minutes.

    Exit code 1 if a promise of determinism was not kept."""
    _need("demo")
    import jax_mok as mok
    from jax_mok.demo import devices as demo_devices
    from jax_mok.demo.loop import Trainer
    from jax_mok.demo.run import run
    from jax_mok.demo.settings import ModelConfig, Plan, Settings, SettingsError

    try:
        model = ModelConfig(moe=mok.MoEConfig(backend=backend.value))
        plan = Plan(steps, output or Path("runs") / f"demo-{framework.value}", resume, replay=replay.value)
        demo_devices.reproducible()
        demo_devices.request(devices)
        mesh = demo_devices.expert_mesh(devices)
        settings = Settings(framework.value, model, devices=mesh.size, seed=seed)
        build = importlib.import_module(f"jax_mok.demo.model_{framework.value}").build
        report = run(Trainer(build(model, mesh, seed), mesh, settings), plan)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(1 if report.failures else 0)


@app.command()
def inspect(
    tokens: Annotated[int, typer.Option(min=1, help="T, over all ranks.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="H")] = 1024,
    inter: Annotated[int, typer.Option(min=1, help="I")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="E")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="K")] = 8,
    ranks: Annotated[int, typer.Option(min=1, help="P, the EP size.")] = 8,
    shared_inter: Annotated[int, typer.Option(min=0, help="I_s; 0 = no shared expert.")] = 0,
    dtype: Dtype = Dtype.BFLOAT16,
    residuals: Residuals = Residuals.SAVE,
    capacity_factor: Annotated[float | None, typer.Option(help="Default: dropless.")] = None,
    backend: Backend = Backend.AUTO,
    backward: Annotated[bool, typer.Option(help="Inspect the gradient's program.")] = True,
) -> None:
    """Compiles the layer for these shapes, without running it, and says what is in the program."""
    import jax_mok as mok
    from jax_mok.cli.inspect import compile_layer
    from jax_mok.cli.shape import Shape
    from jax_mok.demo.settings import SettingsError

    try:
        shape = Shape(tokens, hidden, inter, experts, top_k, ranks, dtype.value, shared_inter)
        config = mok.MoEConfig(backend=backend.value, residuals=residuals.value, capacity_factor=capacity_factor)
        compiled = compile_layer(shape, config, backward=backward)
    except (SettingsError, ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(str(mok.inspect(compiled)))


@app.command()
def bench(
    tokens: Annotated[int, typer.Option(min=1, help="T, over all devices.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, help="H")] = 256,
    inter: Annotated[int, typer.Option(min=1, help="I")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="E")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="K")] = 8,
    devices: Devices = 8,
    dtype: Dtype = Dtype.FLOAT32,
    residuals: Residuals = Residuals.SAVE,
    backend: Annotated[
        list[Backend] | None,
        typer.Option(help="Of ours; may be repeated, the first is compared with the rest. Default: the native one."),
    ] = None,
    baseline: Annotated[
        list[Baseline] | None,
        typer.Option(help="May be repeated. Default, unless a backend is named: all that can run here."),
    ] = None,
    passes: Annotated[Passes, typer.Option("--pass", help="What is timed.")] = Passes.BOTH,
    hot_expert: Annotated[
        float, typer.Option(min=1, help="Rows of the first expert, as a multiple of those of each other one.")
    ] = 1.0,
    train: Annotated[
        bool, typer.Option("--train", help="Time a training step of two decoder layers instead of the layer alone.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed blocks of each program, at most.")] = 50,
    block_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Length of a block of calls; 0 = one call. Default: 0.5 on GPUs, 0 on CPUs."),
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Stop timing after this long, and at least five blocks.")] = 60.0,
    seed: int = 0,
    output: Output = Path("runs/bench"),
) -> None:
    """Times forward, and forward with backward, of our backends and the baselines side by side in one run, on the same
    arrays.

    Exit code 1 if their results do not agree or one of our backends failed; a baseline may fail."""
    _need("bench")
    from jax_mok.cli import bench as harness
    from jax_mok.cli import train_step
    from jax_mok.cli.shape import Shape
    from jax_mok.cli.timing import Plan
    from jax_mok.demo.settings import SettingsError

    if train and passes is not Passes.BOTH:
        raise typer.BadParameter(f"a training step has both passes; leave out --pass {passes.value}, or --train.")
    if train and hot_expert != 1:
        raise typer.BadParameter("a training step has a router; leave out --hot-expert, or --train.")
    try:
        shape = Shape(tokens, hidden, inter, experts, top_k, devices, dtype.value, hot_expert=hot_expert)
        mesh = harness.mesh_for(shape)
        own, others = ([name.value for name in names] if names else None for names in (backend, baseline))
        selection = harness.select(mesh, own, others, residuals.value)
        block = harness.default_block_seconds(mesh) if block_seconds is None else block_seconds
        plan = Plan(rounds, max_seconds, block, seed)
        if train:
            result = train_step.run(shape, mesh, selection, plan, output)
        else:
            result = harness.run(shape, mesh, selection, passes.names(), plan, residuals.value, output)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if result.good else 1)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes to start.")] = 2,
    devices_per_process: Annotated[int, typer.Option(min=1, help="GPUs, or virtual CPU devices, of each.")] = 1,
) -> None:
    """Runs a script in several processes of this machine, joined to one job by jax.distributed.

    Exit code: that of the first process that fails; the others are stopped then."""
    from jax_mok.cli import launch as launcher

    raise typer.Exit(launcher.launch(processes, devices_per_process, script, args or []))


@app.command("compile")
def compile_kernels(
    hidden: Annotated[int, typer.Option(min=8, help="H, a multiple of 8.")],
    inter: Annotated[int, typer.Option(min=8, help="I, a multiple of 8.")],
    top_k: Annotated[int, typer.Option(min=1, help="K")] = 8,
    shared_inter: Annotated[int, typer.Option(min=0, help="I_s, width of the shared expert; 0 = none.")] = 0,
    arch: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: all that have kernels.")] = None,
) -> None:
    """Compiles the CUDA kernels for these shapes into the cache, on a machine with or without a GPU.

    For either kind of residuals and of weight gradients."""
    _need("cuda")
    from jax_mok.runtime import cuda, jit

    archs = arch or list(jit.ARCHS)
    if unknown := [a for a in archs if a not in jit.ARCHS]:
        raise typer.BadParameter(f"no kernels for {', '.join(unknown)}; there are kernels for {', '.join(jit.ARCHS)}.")
    for kernel in jit.KERNELS:
        for name in archs:
            codes = [jit.cubin(kernel, name, b) for b in cuda.builds(kernel, hidden, inter, top_k, shared_inter)]
            typer.echo(f"{kernel} {name}: {len(codes)} builds, {sum(map(len, codes)):,} bytes, in {jit.cache_dir()}")


def _need(extra: str) -> None:
    from jax_mok.cli.extras import missing

    if packages := missing(extra):
        typer.echo(
            f"jax-mok: this command needs {', '.join(packages)}, not installed here. "
            f"Run: pip install 'jax_mok[{extra}]'",
            err=True,
        )
        raise typer.Exit(2)

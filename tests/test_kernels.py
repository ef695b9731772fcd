"""Every kernel compiles for every architecture it has, without spills and without ptxas giving up on wgmma."""

import re

import pytest

from jax_mok.runtime import cuda, jit

pytest.importorskip("cuda.core.utils", reason="needs the packages of the extra 'cuda'")

SHAPES = {
    "DeepSeek-V3-like, float32 weight gradients": (7168, 2048, 8, 2048, True, True),
    "Qwen3-30B-A3B": (2048, 768, 8, 0, False, False),
    "Qwen3-30B-A3B, residuals kept": (2048, 768, 8, 0, True, False),
    "odd widths, float32 weight gradients": (136, 200, 3, 72, False, True),
}


@pytest.mark.parametrize("arch", jit.ARCHS)
@pytest.mark.parametrize("kernel", jit.KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_cleanly(shape, kernel, arch):
    code, log = jit.compile_with_log(kernel, arch, cuda.macros(*SHAPES[shape]))
    assert len(code) > 1000
    assert re.findall(r"(\d+) bytes spill", log), log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
    assert not re.search(r"C75\d\d", log), log


def test_the_compile_command_fills_the_cache(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from jax_mok.cli.app import app

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = ["--hidden", "136", "--inter", "200", "--top-k", "3"]
    done = CliRunner().invoke(app, ["compile", *shape])
    assert done.exit_code == 0, done.output
    builds = sum(len(cuda.builds(kernel, 136, 200, 3, 0)) for kernel in jit.KERNELS)
    assert len([p for p in jit.cache_dir().rglob("*") if p.is_file() and p.stat().st_size > 1000]) == builds
    assert CliRunner().invoke(app, ["compile", *shape, "--arch", "sm_70"]).exit_code == 2


def test_cubins_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = jit.cubin("mok_route", "sm_90a", cuda.macros(136, 200, 3, 0))
    monkeypatch.setattr(jit, "KERNELS", dict.fromkeys(jit.KERNELS, "nothing.cu"))
    with pytest.raises(Exception, match=r"nothing.cu"):  # another source is another key
        jit.cubin("mok_route", "sm_90a", cuda.macros(136, 200, 3, 0))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cubin("mok_route", "sm_90a", cuda.macros(136, 200, 3, 0)) == first
    assert len(list(tmp_path.rglob("*"))) > 1

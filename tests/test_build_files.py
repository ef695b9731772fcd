"""BUILD lists every source file of the tree and nothing that is gone: a file forgotten there breaks Bazel alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIRECTORIES = ("cuda", "jax_mok", "tests", "examples")
SOURCES = {".cc", ".cpp", ".cu", ".cuh", ".h", ".inl", ".py", ".pyi", ".typed"}
FILE_ATTRIBUTES = ("srcs", "hdrs", "textual_hdrs", "data")

# Where a new file most likely belongs, for the message: the longest prefix wins.
HOMES = {
    "cuda/core/": "core",
    "cuda/cpu/": "cpu",
    "cuda/device/": "device",
    "cuda/ffi/": "jax_mok/_native.so",
    "jax_mok/": "jax_mok",
    "tests/": "testing",
    "tests/test_": "TESTS",
    "tests/cpp/": "mok_cpu_test",
    "examples/": "examples",
}


def targets() -> dict[str, set[str]]:
    """Target name -> files and labels that it names. BUILD is Python but for its functions, which are recorded here."""
    found: dict[str, set[str]] = {}

    def rule(**attributes):
        if "name" in attributes:
            files = [f for key in FILE_ATTRIBUTES for f in attributes.get(key, [])]
            found[attributes["name"]] = {f for f in files if not f.startswith(("//", "@"))}

    tree = ast.parse((ROOT / "BUILD").read_text(), "BUILD")
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    functions = dict.fromkeys(called, rule)
    functions["load"] = functions["licenses"] = functions["exports_files"] = lambda *args, **kwargs: None
    functions["select"] = lambda cases: [item for case in cases.values() for item in case]
    exec(compile(tree, "BUILD", "exec"), functions)
    return found


def sources() -> set[str]:
    files = (f for directory in DIRECTORIES for f in (ROOT / directory).rglob("*") if f.suffix in SOURCES)
    return {f.relative_to(ROOT).as_posix() for f in files if "__pycache__" not in f.parts}


@pytest.fixture(scope="module")
def build():
    return targets()


def test_every_source_file_is_in_a_target(build):
    missing = sorted(sources() - set().union(*build.values()))
    hints = [f"{f}  (add it to {HOMES[max((h for h in HOMES if f.startswith(h)), key=len)]})" for f in missing]
    assert not missing, "in no target of BUILD:\n" + "\n".join(hints)


def test_every_listed_file_exists(build):
    gone = sorted(
        f"{file}  (in target {target})"
        for target, files in build.items()
        for file in files
        if not file.startswith(":") and not (ROOT / file).is_file()
    )
    assert not gone, "listed in BUILD but not in the tree:\n" + "\n".join(gone)


def test_every_local_label_is_a_target(build):
    labels = {(target, label[1:]) for target, files in build.items() for label in files if label.startswith(":")}
    wrong = sorted(f":{label}  (in target {target})" for target, label in labels if label not in build)
    assert not wrong, "no such target in BUILD:\n" + "\n".join(wrong)

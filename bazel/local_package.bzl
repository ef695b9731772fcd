"""External repositories made of directories of the local Python: JAX and its headers come from there anyway.

The interpreter is $MOK_PYTHON, or python3. It needs jaxlib and nanobind as [build-system] in pyproject.toml says, and
Python's own headers.
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])
"""

# What to ask Python for, which directories of the answer to take, and what they are to Bazel.
_PACKAGES = {
    "nanobind": struct(
        locate = "import os, nanobind; print(os.path.dirname(nanobind.__file__))",
        directories = {"ext": "ext", "include": "include", "src": "src"},
        build = """
cc_library(
    name = "nanobind",
    srcs = ["src/nb_combined.cpp"],
    hdrs = glob(["include/**/*.h"]),
    copts = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fvisibility=hidden"],
    includes = ["ext/robin_map/include", "include"],
    local_defines = ["NB_BUILD", "NB_COMPACT_ASSERTIONS"],
    textual_hdrs = glob(["ext/**/*.h", "src/*.cpp", "src/*.h"], exclude = ["src/nb_combined.cpp"]),
    deps = ["@python_headers"],
)
""",
    ),
    "python_headers": struct(
        locate = "import sysconfig; print(sysconfig.get_path('include'))",
        directories = {".": "include"},
        build = """
cc_library(
    name = "python_headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
""",
    ),
    "xla_ffi": struct(
        locate = "import os, jaxlib; print(os.path.dirname(jaxlib.__file__))",
        directories = {"include": "include"},
        build = """
cc_library(
    name = "xla_ffi",
    hdrs = glob(["include/xla/ffi/**/*.h"]),
    includes = ["include"],
)
""",
    ),
}

def _local_package_impl(ctx):
    package = _PACKAGES[ctx.attr.package]
    python = ctx.os.environ.get("MOK_PYTHON", "python3")
    result = ctx.execute([python, "-c", package.locate])
    if result.return_code != 0:
        fail("%s has no %s; set MOK_PYTHON to a Python that has it:\n%s" % (python, ctx.attr.package, result.stderr))
    for source, name in package.directories.items():
        ctx.symlink(result.stdout.strip() + "/" + source, name)
    ctx.file("BUILD", _BUILD + package.build)

local_package = repository_rule(
    implementation = _local_package_impl,
    attrs = {"package": attr.string(mandatory = True, values = sorted(_PACKAGES.keys()))},
    environ = ["MOK_PYTHON"],
    local = True,
)

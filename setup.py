"""Builds the C++17 core. The metadata of the package is in pyproject.toml."""

import os
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

sources = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
headers = sorted(str(path) for path in Path("csrc").rglob("*.h"))

# If the compiler links libstdc++ statically, its symbols must stay private. Otherwise some would bind to torch's copy of it.
link_arguments = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []

# The compiler takes the last level of optimization, and these flags come after CFLAGS. A level that CFLAGS sets should count.
optimization = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]

ParallelCompile().install()  # one compiler process per core
setup(
    ext_modules=[
        Pybind11Extension(
            "lightning_freescale._C",
            sources,
            depends=headers,
            cxx_std=17,
            # The updates of rows must have the same bits, wherever a row lies: no merged multiplications and additions.
            extra_compile_args=[*optimization, "-Wall", "-Wextra", "-ffp-contract=off"],
            extra_link_args=link_arguments,
        )
    ],
    cmdclass={"build_ext": build_ext},
)

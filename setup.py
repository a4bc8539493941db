"""Builds the C++17 core. The metadata of the package is in pyproject.toml."""

import os
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path("csrc")
sources = sorted(str(path) for path in ROOT.rglob("*.cpp"))
headers = sorted(str(path) for path in ROOT.rglob("*.h"))

# If the compiler links libstdc++ statically, its symbols must stay private. Otherwise some would bind to torch's copy of it.
link_arguments = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []

# The compiler takes the last level of optimization, and these flags come after those of the environment. A level that the
# environment sets should count. It depends on the release of setuptools which of the two variables is used for C++.
optimization = [] if "-O" in os.environ.get("CFLAGS", "") + os.environ.get("CXXFLAGS", "") else ["-O3"]


class MergedBuild(build_ext):
    """Compiles two files, of which one includes all bindings and the other all other sources.

    The compiler then reads each header twice at most. That takes less than half the time of a compilation per source.
    """

    def build_extension(self, extension: Pybind11Extension) -> None:
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        bindings = [path for path in extension.sources if Path(path).name == "bindings.cpp"]
        parts = {"all_bindings.cpp": bindings, "all_others.cpp": sorted(set(extension.sources) - set(bindings))}
        for name, included in parts.items():
            lines = [f'#include "{Path(path).relative_to(ROOT).as_posix()}"\n' for path in included]
            Path(self.build_temp, name).write_text("".join(lines))
        extension.sources = [str(Path(self.build_temp, name)) for name in parts]
        super().build_extension(extension)


ParallelCompile().install()  # one compiler process per core
setup(
    ext_modules=[
        Pybind11Extension(
            "lightning_freescale._C",
            sources,
            include_dirs=[str(ROOT)],
            depends=[*sources, *headers],
            cxx_std=17,
            # The updates of rows must have the same bits, wherever a row lies: no merged multiplications and additions.
            extra_compile_args=[*optimization, "-Wall", "-Wextra", "-ffp-contract=off"],
            extra_link_args=link_arguments,
        )
    ],
    cmdclass={"build_ext": MergedBuild},
)

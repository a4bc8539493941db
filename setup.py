"""Builds the C++17 core. Metadata lives in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

sources = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
headers = sorted(str(path) for path in Path("csrc").glob("*.h"))

ParallelCompile().install()  # one compiler per core
setup(
    ext_modules=[
        Pybind11Extension(
            "lightning_freescale._C",
            sources,
            depends=headers,
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)

"""Compile the kernels when they are first used, with the compiler library that PyTorch's CUDA wheels bring (NVRTC)."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = (
    "kernels.cu",
    "ptx.cuh",
    "wgmma.cuh",
    "tile.cuh",
    "bias.cuh",
    "forward.cuh",
    "backward.cuh",
    "backward_tiles.cuh",
    "backward_keys.cuh",
    "backward_queries.cuh",
    "rows.cuh",
    "silu.cuh",
)
ARCHITECTURE = "sm_90a"


def _library() -> ctypes.CDLL:
    """Load NVRTC: by name, or from the folders where pip installs it."""
    major = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{major}"]
    for folder in sys.path:
        names += sorted(glob.glob(f"{folder}/nvidia/*/lib/libnvrtc.so.{major}"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"libnvrtc.so.{major} was not found; pip install nvidia-cuda-nvrtc")


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "lightning_freescale" / "hopper"


def _key(options: list[str]) -> str:
    """A name for these sources, these options and this compiler."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    digest.update(" ".join([ARCHITECTURE, str(torch.version.cuda), *options]).encode())
    return digest.hexdigest()[:32]


def _compile(options: list[str]) -> bytes:
    nvrtc = _library()
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")

    source = (FOLDER / "kernels.cu").read_bytes()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    try:
        flags = [f"--gpu-architecture={ARCHITECTURE}", "-std=c++17", f"-I{FOLDER}", *options]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), array)
        size = ctypes.c_size_t()
        if status:
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC could not compile the attention kernels:\n{log.value.decode()}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def compiled(options: list[str]) -> bytes:
    """Machine code of ``kernels.cu`` with these definitions, from the cache if it is there."""
    path = cache_folder() / f"{_key(options)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    binary = _compile(options)
    try:  # written beside its place and renamed: other processes see all of it or nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)
    except OSError:
        pass  # no cache: the next process compiles again
    return binary

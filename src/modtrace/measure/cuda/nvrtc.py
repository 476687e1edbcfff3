"""Compiles CUDA C++ at run time by NVRTC, which comes with torch. No CUDA toolkit is needed."""

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class CompilationError(Exception):
    """NVRTC is not there, or it refused a program."""


def compile_program(source: str, capability: tuple[int, int], options: Sequence[str]) -> bytes:
    """Returns machine code for devices of a compute capability; PTX if NVRTC is older than the device.

    Code is kept on disk, by source, options, capability and version of NVRTC.

    Args:
        source: CUDA C++ that includes no header.
        capability: the major and minor number.
        options: more options of NVRTC, such as definitions.

    Raises:
        CompilationError: NVRTC is not found, or it refuses the source.
    """
    compiler = _Nvrtc()
    options = ("--std=c++17", "--fmad=false", *options, compiler.architecture_option(capability))
    key = hashlib.sha256("\0".join((source, *options, *map(str, compiler.version))).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(cache, "modtrace", "kernels", f"{key[:32]}.bin")
    with suppress(OSError):
        code, digest = (kept := path.read_bytes())[:-32], kept[-32:]
        if hashlib.sha256(code).digest() == digest:  # the disk may have been full
            return code
    code = compiler.compile(source, options)
    with suppress(OSError):  # a folder that is read-only: it is compiled again in the next process
        _write(path, code + hashlib.sha256(code).digest())
    return code


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class _Nvrtc:
    """The library, as far as it is used here."""

    def __init__(self) -> None:
        self._library = _open_library()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = major.value, minor.value

    def architecture_option(self, capability: tuple[int, int]) -> str:
        """Returns the option for a device, or for the newest one that the library knows if the device is newer."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        known = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(known), "nvrtcGetSupportedArchs")
        wanted = 10 * capability[0] + capability[1]
        if wanted in known:
            return f"--gpu-architecture=sm_{wanted}"
        older = [number for number in known if number <= wanted]
        if not older:
            raise CompilationError(f"NVRTC {self.version} does not know compute capability {capability}")
        return f"--gpu-architecture=compute_{max(older)}"

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"modtrace.cu", 0, None, None
            ),
            "nvrtcCreateProgram",
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), arguments):
                raise CompilationError(self._read(program, "nvrtcGetProgramLog").decode(errors="replace"))
            is_machine_code = any("=sm_" in option for option in options)
            return self._read(program, "nvrtcGetCUBIN" if is_machine_code else "nvrtcGetPTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: Any, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"{name}Size")(program, ctypes.byref(size)), f"{name}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, name)(program, buffer), name)
        return buffer.raw

    def _check(self, status: int, name: str) -> None:
        if status:
            raise CompilationError(f"NVRTC: {name} returned {status}")


def _open_library() -> Any:
    tried = []
    for path in _library_paths():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
            continue
        if hasattr(library, "nvrtcCompileProgram"):  # `libnvrtc-builtins` has not
            return library
        tried.append(f"{path} is another library")
    raise CompilationError(f"NVRTC is not found: {'; '.join(tried)}")


def _library_paths() -> Iterator[str]:
    """Yields the paths to try for NVRTC: pip's nvidia packages, torch's folder, then the name alone for the system."""
    major = (torch.version.cuda or "").split(".")[0]
    for folder in sys.path:
        nvidia = Path(folder or ".") / "nvidia"
        for pattern in (f"cu{major}/lib/libnvrtc.so.{major}", f"cuda_nvrtc/lib/libnvrtc.so.{major}*"):
            yield from map(str, sorted(nvidia.glob(pattern)))
    yield from map(str, sorted((Path(torch.__file__).parent / "lib").glob("libnvrtc*.so*")))
    yield f"libnvrtc.so.{major}"

"""Builds what is compiled where there is a C compiler; without it values and ops are recorded more slowly."""

import os
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.split(".")[0]) < 77:  # older ones refuse pyproject.toml, and do not say why
    sys.exit(
        f"setup.py: modtrace needs setuptools 77 or newer, and this is {setuptools.__version__}. "
        "Install it: pip install --upgrade setuptools (pip install . brings its own)"
    )

_FLAGS = {
    # off: every processor is to give the same bits. hidden: the files of a part call each other directly.
    "unix": ["-O3", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden"],
    "msvc": ["/O2", "/fp:precise"],
}

#: `make sanitize` gives some; they stand behind those above, where CFLAGS would stand before them.
_MORE_FLAGS = os.environ.get("MODTRACE_CFLAGS", "").split()

_TENSOR_IDS = (
    "_tensor_ids_module",
    "_tensor_ids",
    "_tensor_ids_type",
    "_argument_reader",
    "_geometries",
    "_storages",
    "_columns",
)


class CleanBuild(build):
    """Builds anew: a file that an older version has left in the folder would be installed too."""

    def run(self) -> None:
        for built in (Path(self.build_lib), *Path(self.build_base).glob("bdist.*/wheel")):
            if (built / "modtrace").resolve() != Path("src/modtrace").resolve():
                shutil.rmtree(built / "modtrace", ignore_errors=True)
        super().run()


class BuildWithFlags(build_ext):
    """Gives each compiler the flags it knows, and compiles parts beside each other."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args = [*_FLAGS.get(self.compiler.compiler_type, []), *_MORE_FLAGS]
        super().build_extension(ext)


#: What no other system than those of POSIX has signals for.
_POSIX_MODULES = [
    Extension(
        "modtrace.cli._blocked_call",
        ["src/modtrace/cli/_blocked_call.c"],
        py_limited_api=True,
        optional=True,
    ),
    Extension(
        "modtrace.measure.cuda._cuda_launch",
        ["src/modtrace/measure/cuda/_cuda_launch.c"],
        depends=["src/modtrace/measure/_measurements.h"],
        libraries=["dl"] if sys.platform == "linux" else [],
        py_limited_api=True,
        optional=True,
    ),
]

setup(
    cmdclass={"build": CleanBuild, "build_ext": BuildWithFlags},
    ext_modules=[
        Extension(
            "modtrace.measure.moments._moments",
            [
                f"src/modtrace/measure/moments/{name}.c"
                for name in ("_moments_module", "_host_measurer", "_moments")
            ],
            depends=[
                "src/modtrace/measure/_exchange.h",
                "src/modtrace/measure/_floats.h",
                "src/modtrace/measure/_kinds.h",
                "src/modtrace/measure/_measurements.h",
                "src/modtrace/measure/moments/_moments.h",
                "src/modtrace/measure/moments/_vectors.h",
            ],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.measure.fingerprints._fingerprint",
            ["src/modtrace/measure/fingerprints/_fingerprint.c"],
            depends=[
                "src/modtrace/measure/fingerprints/_fingerprint_loops.h",
                "src/modtrace/measure/_floats.h",
                "src/modtrace/measure/_kinds.h",
            ],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.measure.tier2._tier2",
            ["src/modtrace/measure/tier2/_tier2.c"],
            depends=["src/modtrace/measure/_floats.h", "src/modtrace/measure/_kinds.h"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.collect.tensor_ids._tensor_ids",
            [f"src/modtrace/collect/tensor_ids/{name}.c" for name in _TENSOR_IDS],
            depends=[
                "src/modtrace/measure/_exchange.h",
                "src/modtrace/collect/_shared.h",
                "src/modtrace/collect/tensor_ids/_tensor_ids.h",
            ],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.collect.ops._op_mode",
            [
                f"src/modtrace/collect/ops/{name}.c"
                for name in (
                    "_op_mode_type",
                    "_op_mode",
                    "_op_common",
                    "_op_values",
                    "_operators",
                    "_places",
                )
            ],
            depends=[
                "src/modtrace/collect/ops/_op_mode.h",
                "src/modtrace/collect/_shared.h",
                "src/modtrace/measure/_exchange.h",
                "src/modtrace/collect/_shared.h",
                "src/modtrace/collect/tensor_ids/_tensor_ids.h",
            ],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.collect.values._taps",
            ["src/modtrace/collect/values/_taps.c"],
            depends=["src/modtrace/collect/_shared.h"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.collect.collectives._called",
            [f"src/modtrace/collect/collectives/{name}.c" for name in ("_called_type", "_called")],
            depends=[
                "src/modtrace/measure/_exchange.h",
                "src/modtrace/collect/_shared.h",
                "src/modtrace/collect/collectives/_called.h",
            ],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modtrace.torch_internals._released_in_turn",
            ["src/modtrace/torch_internals/_released_in_turn.c"],
            py_limited_api=True,
            optional=True,
        ),
        *(_POSIX_MODULES if os.name == "posix" else ()),
    ],
)

"""Builds the compiled kernel where there is a C compiler; without it numpy measures, about three times slower."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FLAGS = {
    "unix": ["-O3", "-std=gnu11", "-ffp-contract=off"],  # off: every processor is to give the same bits
    "msvc": ["/O2", "/fp:precise"],
}


class BuildWithFlags(build_ext):
    """Gives each compiler the flags it knows."""

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args = _FLAGS.get(self.compiler.compiler_type, [])
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildWithFlags},
    ext_modules=[
        Extension(
            "modtrace.measure._native",
            ["src/modtrace/measure/_native.c"],
            py_limited_api=True,
            optional=True,
        )
    ],
)

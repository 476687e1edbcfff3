"""Builds the compiled kernel where there is a C compiler; without it numpy measures, about three times slower."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "modtrace.measure._native",
            ["src/modtrace/measure/_native.c"],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=True,
            optional=True,
        )
    ]
)

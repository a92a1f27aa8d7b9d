"""The optional native parts. Without a compiler the package installs all the same and uses torch's and zlib's."""

from setuptools import Extension, setup

# No fast-math: NaN and infinities are what is being looked for. Memory is read as several types.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-g0", "-pthread"]
SHARED = [
    f"src/torchtap/reduce/{name}.h" for name in ("_bfloat16", "_halves_isa", "_float_mode", "_processor")
]

setup(
    ext_modules=[
        Extension(
            "torchtap.reduce._native",
            sources=["src/torchtap/reduce/_native.c"],
            depends=[
                f"src/torchtap/reduce/_native_{part}.h"
                for part in ("kernel", "state", "block", "isa", "layout")
            ]
            + SHARED,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "torchtap.reduce._rows",
            sources=["src/torchtap/reduce/_rows.c"],
            depends=[f"src/torchtap/reduce/_rows_{part}.h" for part in ("kernel", "isa")] + SHARED,
            extra_compile_args=FLAGS,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "torchtap.comparison.measure._distance",
            sources=["src/torchtap/comparison/measure/_distance.c"],
            depends=["src/torchtap/comparison/measure/_distance_kernel.h", *SHARED],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "torchtap.store.format._checksum",
            sources=["src/torchtap/store/format/_checksum.c"],
            extra_compile_args=["-O3"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

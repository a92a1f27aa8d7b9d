"""The optional native parts. Without a compiler the package installs all the same and uses torch's and zlib's.

A wheel says by its tag whether it has them, and is not built without the viewer's page.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PAGE = Path(__file__).parent / "src/torchtap/viewer/static/app.js"


class Wheel(bdist_wheel):
    """Tagged by what was really built: where no extension was, the wheel is for every platform."""

    def get_tag(self):
        if not any(Path(self.bdist_dir).rglob("*.so")) and not any(Path(self.bdist_dir).rglob("*.pyd")):
            return "py3", "none", "any"
        return super().get_tag()


class Python(build_py):
    """Refuses to build a package without its page, whose absence nobody would notice before `torchtap view`."""

    def run(self):
        if not self.editable_mode and not PAGE.is_file():
            raise SystemExit(f"{PAGE} is missing: the viewer's page was not built (make frontend)")
        super().run()


# No fast-math: NaN and infinities are what is being looked for. Memory is read as several types.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-g0", "-pthread"]
SHARED = [
    f"src/torchtap/reduce/{name}.h" for name in ("_bfloat16", "_halves_isa", "_float_mode", "_processor")
]
# Every part names the C library it was built with, also one that calls nothing of it: wheels are tagged by it.
LINKED = ["-Wl,--push-state,--no-as-needed,-lc,--pop-state"] if sys.platform == "linux" else []

setup(
    ext_modules=[
        Extension(
            "torchtap.reduce._native",
            sources=["src/torchtap/reduce/_native.c"],
            depends=[
                f"src/torchtap/reduce/_native_{part}.h"
                for part in (
                    "kernel",
                    "state",
                    "block",
                    "look_avx2",
                    "look_avx512",
                    "isa",
                    "layout",
                    "tensor",
                    "records",
                    "taking",
                    "hearing",
                    "copying",
                    "modules",
                    "hooks",
                    "fetching",
                )
            ]
            + SHARED,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", *LINKED],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "torchtap.comparison._distance",
            sources=["src/torchtap/comparison/_distance.c"],
            depends=["src/torchtap/comparison/_distance_kernel.h", *SHARED],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            extra_link_args=LINKED,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "torchtap.store.format._checksum",
            sources=["src/torchtap/store/format/_checksum.c"],
            depends=["src/torchtap/store/format/_checksum_kernel.h"],
            extra_compile_args=["-O3"],
            extra_link_args=LINKED,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
    ],
    cmdclass={"bdist_wheel": Wheel, "build_py": Python},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

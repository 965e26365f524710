"""Builds the core (`adasum_hvd/core`) into the package, where there is a C++ compiler.

Without one the package installs, too: `adasum_hvd.distributed` then uses torch's operations. The
wheel is for every Python of a platform, because the core includes no header of Python's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

SOURCE = Path(__file__).parent / "adasum_hvd" / "core"
LIBRARY = Extension("adasum_hvd.core.libadasum", sources=[], optional=True)
REQUIRED = "ADASUM_HVD_REQUIRE_CORE"  # if set, an error of the compiler ends the build


class BuildCore(build_ext):
    """Runs CMake; the library lies beside `core/__init__.py`."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path in the package, which names no version of Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build the core, or say why there is none."""
        # Kept, so that a change compiles what it needs.
        folder = Path("build", "core").resolve()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        jobs = str(len(os.sched_getaffinity(0)) + 1)
        # A virtual environment's cmake and ninja.
        path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
        configure = ["cmake", "-S", SOURCE.resolve(), "-B", folder, "-G", "Ninja"]
        compile_all = ["cmake", "--build", folder, "--parallel", jobs]
        try:
            folder.parent.mkdir(exist_ok=True)
            # `make` compiles while pip installs, and pip then does so in the same folder.
            lock = folder.with_suffix(".lock").open("w")
            with contextlib.suppress(OSError):  # of file systems without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            for command in (configure, compile_all):
                subprocess.run(
                    command, check=True, env=os.environ | {"PATH": path}, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stdout", "") or "")
            if os.environ.get(REQUIRED):
                raise RuntimeError(f"no core: {error}\n{said}") from error
            self.warn(
                f"no core: {error}; adasum_hvd.distributed uses torch's operations\n{said[-2000:]}"
            )
            return
        self.mkpath(str(target.parent))
        self.copy_file(str(folder / "libadasum.so"), str(target))


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[LIBRARY],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": PlatformWheel},
)

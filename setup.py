"""Lets setuptools build csrc/ with ninja (csrc/ninja_build.py). All else is in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))  # pip does not put it there
import ninja_build


class NinjaBuildExt(build_ext):
    outputs: tuple[str, ...] = ()

    def run(self) -> None:
        package = Path("" if self.inplace else self.build_lib) / "txl_kernels"
        package.mkdir(parents=True, exist_ok=True)
        for built in ninja_build.build_native(verbose=self.verbose > 1):
            target = package / built.name
            # Replaced, not overwritten: a running process may have the old file mapped. By a name of our own,
            # for another build may do the same.
            new = f"{target}.{os.getpid()}.new"
            shutil.copy2(built, new)
            os.replace(new, target)
            self.outputs += (str(target),)
        cuda = package / "libtxl_cuda.so"
        if str(cuda) not in self.outputs:  # one from an earlier build would be loaded, or packed into a wheel
            cuda.unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        return list(self.outputs)

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install builds in place


setup(
    # Tells setuptools that the package holds compiled code; how it is built is NinjaBuildExt's business.
    ext_modules=[Extension("txl_kernels._build_info", ["csrc/build_info.cpp"])],
    cmdclass={"build_ext": NinjaBuildExt},
)

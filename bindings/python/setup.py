"""The tag of the wheel: any Python, and the machine of libpagoda.so if that is inside. Without it, as when pip installs
from the repository, the package is the exporter, and uses a libpagoda.so that is installed elsewhere."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

HAS_LIBRARY = (Path(__file__).parent / "pagoda/lib/libpagoda.so").exists()


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return HAS_LIBRARY


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2]) if HAS_LIBRARY else super().get_tag()


setup(distclass=WithLibrary, cmdclass={"bdist_wheel": Wheel})

"""What an installed package offers to C and C++ builds."""

import re
from importlib import metadata
from pathlib import Path

import kvquant


def test_headers():
    assert {path.name for path in Path(kvquant.get_include(), "kvquant").iterdir()} == {"kvquant.h", "kvquant.hpp"}


def test_cmake_package():
    folder = Path(kvquant.get_cmake_dir())
    assert (folder / "kvquantConfig.cmake").is_file()
    version = (folder / "kvquantConfigVersion.cmake").read_text()
    assert re.search(r'set\(PACKAGE_VERSION "(.*)"\)', version).group(1) == kvquant.__version__


def test_cmake_package_is_found_by_scikit_build_core():
    (entry,) = (e for e in metadata.entry_points(group="cmake.root") if e.name == "kvquant")
    root = Path(metadata.distribution("kvquant-kernels").locate_file(entry.value))
    assert (root / "lib" / "cmake" / "kvquant" / "kvquantConfig.cmake").is_file()


def test_pkg_config_file():
    text = Path(kvquant.get_cmake_dir()).parents[1].joinpath("pkgconfig", "kvquant.pc").read_text()
    values = dict(re.findall(r"^(\w+)[=:] ?(.*)$", text, re.M))
    prefix = values["prefix"].replace("${pcfiledir}", str(Path(kvquant.get_cmake_dir()).parents[1] / "pkgconfig"))
    (include,) = re.findall(r"-I(\S+)", values["Cflags"].replace("${prefix}", prefix))
    assert Path(include).resolve() == Path(kvquant.get_include()).resolve()
    assert values["Version"] == kvquant.__version__

"""kvquant: dequantise, rotary embedding, int8 quantisation and KV-cache scatter in one pass on the CPU."""
from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import distribution as _distribution

try:
    _installed = _distribution("kvquant-kernels")
except _NotFound:
    raise ImportError("kvquant is not installed here; run `pip install .` in its source folder") from None
# In a source checkout Python finds this folder before the installed package; the compiled module is in the latter.
__path__.append(str(_installed.locate_file("kvquant")))

from kvquant import isa, reference  # noqa: E402
from kvquant._core import Plan, dequant_rope_quant_kvcache, plan  # noqa: E402
from kvquant.layout import slots  # noqa: E402

__version__ = _installed.version
__all__ = ["Plan", "dequant_rope_quant_kvcache", "get_cmake_dir", "get_include", "isa", "plan", "reference", "slots"]


def get_include() -> str:
    """The folder with the headers kvquant/kvquant.h (C) and kvquant/kvquant.hpp (C++)."""
    return str(_installed.locate_file("kvquant/include"))


def get_cmake_dir() -> str:
    """The folder with kvquantConfig.cmake, for find_package(kvquant). Builds by scikit-build-core find it by themselves."""
    return str(_installed.locate_file("kvquant/lib/cmake/kvquant"))

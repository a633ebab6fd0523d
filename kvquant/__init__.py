"""kvquant: dequantise, rotary embedding, int8 quantisation and KV-cache scatter in one pass on the CPU."""
from importlib.metadata import version as _version
from pathlib import Path as _Path

from kvquant import isa, reference
from kvquant._core import Plan, dequant_rope_quant_kvcache, plan

__version__ = _version("kvquant-kernels")
__all__ = ["Plan", "dequant_rope_quant_kvcache", "get_cmake_dir", "get_include", "isa", "plan", "reference"]


def get_include() -> str:
    """The folder with the C++ header kvquant/kvquant.hpp."""
    return str(_Path(__file__).parent / "include")


def get_cmake_dir() -> str:
    """The folder with kvquantConfig.cmake, for find_package(kvquant)."""
    return str(_Path(__file__).parent / "lib" / "cmake" / "kvquant")

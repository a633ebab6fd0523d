"""Types of the compiled module. Public are the names that kvquant/__init__.py re-exports."""
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]
_Index: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
_Out: TypeAlias = tuple[_Array | None, _Array | None, _Array | None] | list[_Array | None]
_Result: TypeAlias = tuple[_Array, _Array, _Array, NDArray[np.int8], NDArray[np.int8]]
_Splits: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

compiler: str

def dequant_rope_quant_kvcache(
    x: _Array,
    cos: _Array,
    sin: _Array,
    k_cache: NDArray[np.int8],
    v_cache: NDArray[np.int8],
    indices: _Index,
    scale_k: NDArray[np.float32],
    scale_v: NDArray[np.float32],
    size_splits: _Splits,
    *,
    offset_k: NDArray[np.float32] | None = None,
    offset_v: NDArray[np.float32] | None = None,
    weight_scale: NDArray[np.float32] | None = None,
    activation_scale: NDArray[np.float32] | None = None,
    bias: _Array | None = None,
    positions: _Index | None = None,
    quant_mode: Literal[0, "static"] = 0,
    input_layout: Literal["BSND"] = "BSND",
    kv_output: bool = False,
    cache_mode: Literal["contiguous", "page"] = "contiguous",
    numerics: Literal["fp32", "ascend"] = "fp32",
    padding_index: Literal[-1] | None = None,
    allow_duplicates: bool = False,
    vendor_limits: bool = False,
    out: _Out | None = None,
    num_threads: int | None = None,
    isa: str | None = None,
) -> _Result: ...

class Plan:
    def run(
        self,
        indices: _Index | None = None,
        *,
        x: _Array | None = None,
        cos: _Array | None = None,
        sin: _Array | None = None,
        k_cache: NDArray[np.int8] | None = None,
        v_cache: NDArray[np.int8] | None = None,
        scale_k: NDArray[np.float32] | None = None,
        scale_v: NDArray[np.float32] | None = None,
        offset_k: NDArray[np.float32] | None = None,
        offset_v: NDArray[np.float32] | None = None,
        weight_scale: NDArray[np.float32] | None = None,
        activation_scale: NDArray[np.float32] | None = None,
        bias: _Array | None = None,
        positions: _Index | None = None,
        out: _Out | None = None,
        num_threads: int | None = None,
    ) -> _Result: ...
    def describe(self) -> str: ...
    def __copy__(self) -> Plan: ...

def plan(
    x: _Array,
    cos: _Array,
    sin: _Array,
    k_cache: NDArray[np.int8],
    v_cache: NDArray[np.int8],
    indices: _Index,
    scale_k: NDArray[np.float32],
    scale_v: NDArray[np.float32],
    size_splits: _Splits,
    *,
    offset_k: NDArray[np.float32] | None = None,
    offset_v: NDArray[np.float32] | None = None,
    weight_scale: NDArray[np.float32] | None = None,
    activation_scale: NDArray[np.float32] | None = None,
    bias: _Array | None = None,
    positions: _Index | None = None,
    quant_mode: Literal[0, "static"] = 0,
    input_layout: Literal["BSND"] = "BSND",
    kv_output: bool = False,
    cache_mode: Literal["contiguous", "page"] = "contiguous",
    numerics: Literal["fp32", "ascend"] = "fp32",
    padding_index: Literal[-1] | None = None,
    allow_duplicates: bool = False,
    vendor_limits: bool = False,
    out: _Out | None = None,
    num_threads: int | None = None,
    isa: str | None = None,
) -> Plan: ...

# For kvquant.torch, which has the types that callers see.
def use_tensors(
    type_: type, is_grad_enabled: Any, forward: Any, increment: Any, dtypes: dict[str, Any], capsule: Any
) -> bool: ...
def tensor_call(
    x: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, indices: Any, scale_k: Any, scale_v: Any, size_splits: Any,
    offset_k: Any = None, offset_v: Any = None, weight_scale: Any = None, activation_scale: Any = None, bias: Any = None,
    quant_mode: Any = 0, input_layout: Any = "BSND", kv_output: Any = False, cache_mode: Any = "contiguous",
    numerics: Any = "fp32", positions: Any = None, padding_index: Any = None, allow_duplicates: Any = False,
    vendor_limits: Any = False, num_threads: Any = None, isa: Any = None,
) -> tuple[Any, Any, Any]: ...
def tensor_plan(
    x: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, indices: Any, scale_k: Any, scale_v: Any, size_splits: Any, *,
    offset_k: Any = None, offset_v: Any = None, weight_scale: Any = None, activation_scale: Any = None, bias: Any = None,
    positions: Any = None, quant_mode: Any = 0, input_layout: Any = "BSND", kv_output: Any = False,
    cache_mode: Any = "contiguous", numerics: Any = "fp32", padding_index: Any = None, allow_duplicates: Any = False,
    vendor_limits: Any = False, out: Any = None, num_threads: Any = None, isa: Any = None,
) -> Plan: ...
def target_names() -> list[str]: ...
def missing_features() -> list[str | None]: ...
def active() -> str: ...
def rows_written() -> dict[str, int]: ...
def pool_workers() -> int: ...
def pool_refuse_starts(refuse: bool) -> None: ...
def pool_always_wake(always: bool) -> None: ...
def pool_hold_locks(milliseconds: int) -> None: ...

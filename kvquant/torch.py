"""The operator for PyTorch tensors on the CPU: an op that torch.compile takes as it is, and torch_npu's two functions.

Needs PyTorch; nothing else in kvquant does. Tensors are read and written in place, never copied; any strides that the contract
allows (docs/contract.md, I5) work, so K and V may be views of one cache. There is no backward pass.

The op is torch.ops.kvquant.dequant_rope_quant_kvcache: it writes k_cache and v_cache and returns q, k and v, new tensors. Its
overload `default` has torch_npu's arguments and numerics, `full` all of kvquant's, as each argument that an op has costs PyTorch
50 ns per call even where it is left out.
"""
from collections.abc import Sequence
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("kvquant.torch needs PyTorch, which is not installed") from error

from torch import Tensor

from kvquant import _core
from kvquant._core import Plan

__all__ = ["Plan", "dequant_rope_quant_kvcache", "npu_dequant_rope_quant_kvcache", "npu_rope_quant_kvcache", "plan"]

_Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_core.use_tensors(
    Tensor,
    torch.is_grad_enabled,
    torch.autograd.forward_ad,
    getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),  # the second adds 0.1 us to the first
    {name: getattr(torch, name) for name in ("int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
                                             "uint8", "int16")},
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
)  # fmt: skip

# The op -----------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("kvquant", "DEF")
_arguments = (
    "Tensor x, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, Tensor scale_k, Tensor scale_v, "
    "int[] size_splits, Tensor? offset_k=None, Tensor? offset_v=None, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    'Tensor? bias=None, int quant_mode=0, str input_layout="BSND", bool kv_output=False, str cache_mode="contiguous", '
    'str numerics="fp32"'
)
_more_arguments = (
    ", Tensor? positions=None, int? padding_index=None, bool allow_duplicates=False, bool vendor_limits=False, "
    "int? num_threads=None, str? isa=None"
)


def _shapes(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, scale_k: Tensor, scale_v: Tensor,
    size_splits: Sequence[int], offset_k: Tensor | None = None, offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None, quant_mode: int = 0,
    input_layout: str = "BSND", kv_output: bool = False, cache_mode: str = "contiguous", numerics: str = "fp32",
    positions: Tensor | None = None, *others: Any, **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Results without values, for tracing; the checks that tracing would otherwise pass by."""
    looked_at = locals()
    if x.dtype is not torch.int32:  # C3
        looked_at = {name: value for name, value in looked_at.items() if name not in ("weight_scale", "activation_scale", "bias")}
    for name, value in looked_at.items():
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                raise ValueError(f"{name}: expected a CPU tensor, got one on {value.device}")
            if value.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: expected a tensor that requires no grad, as there is no backward pass; "
                                 "got requires_grad=True")  # fmt: skip
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache: expected 4 dimensions, got {k_cache.dim()}")
    heads, dim = k_cache.shape[2:]
    if dim == 0:
        raise ValueError("k_cache: expected an even head size D of at least 2 on the last axis, got 0")
    if len(size_splits) != 3:
        raise ValueError(f"size_splits: expected 3 integers, got {len(size_splits)}")
    if size_splits[0] < 0:
        raise ValueError(f"size_splits[0]: expected a length in columns, got {size_splits[0]}")
    kv_shape = (*x.shape[:-1], heads, dim) if kv_output else (0,)
    return cos.new_empty((*x.shape[:-1], size_splits[0] // dim, dim)), cos.new_empty(kv_shape), cos.new_empty(kv_shape)


def _define(overload: str, arguments: str) -> Any:
    name = "dequant_rope_quant_kvcache" + overload
    _library.define(f"{name}({arguments}) -> (Tensor, Tensor, Tensor)",
                    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))  # fmt: skip
    # For every device: a tensor that is not on the CPU then gets kvquant's error, which names the argument.
    _library.impl(name, _core.tensor_call, "CompositeExplicitAutograd")
    torch.library.register_fake("kvquant::" + name, _shapes, lib=_library)
    return getattr(torch.ops.kvquant.dequant_rope_quant_kvcache, overload.removeprefix(".") or "default")


_op = _define("", _arguments)
_full_op = _define(".full", _arguments + _more_arguments)
_full_only = frozenset(("positions", "padding_index", "allow_duplicates", "vendor_limits", "num_threads", "isa"))

# Functions ---------------------------------------------------------------------------------------------------------------


def dequant_rope_quant_kvcache(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, scale_k: Tensor, scale_v: Tensor,
    size_splits: Sequence[int], *, offset_k: Tensor | None = None, offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None, **options: Any,
) -> _Result:  # fmt: skip
    """kvquant.dequant_rope_quant_kvcache for CPU tensors: the same shapes, dtypes, options, bytes and errors.

    options: positions, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index, allow_duplicates, vendor_limits,
    num_threads and isa; no `out` (see plan). Each one given costs PyTorch 0.4 us, so those left out are not passed on.

    bfloat16 is torch.bfloat16. Returns (q, k, v, k_cache, v_cache): three new tensors, k and v of shape (0,) without kv_output, and
    the caches passed in, written in place. As with tensors from NumPy, resize_() cannot make the new ones larger. Works under
    torch.compile, torch.inference_mode and FakeTensorMode.

    Raises what kvquant.dequant_rope_quant_kvcache raises, before anything is written; also ValueError for a tensor that is not on
    the CPU, for one that requires grad while gradients are enabled and for one with a tangent. PyTorch itself reads the arguments by
    their types: what it can't read is its RuntimeError, and it takes 1 for True. PyTorch knows no read-only tensors: one made of a
    read-only array is written.
    """
    op = _op
    if options:
        if options.get("quant_mode") == "static":
            options["quant_mode"] = 0
        if not _full_only.isdisjoint(options):
            op = _full_op
    q, k, v = op(
        x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, weight_scale, activation_scale,
        bias, **options,
    )  # fmt: skip
    return q, k, v, k_cache, v_cache


def npu_dequant_rope_quant_kvcache(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, scale_k: Tensor, scale_v: Tensor,
    size_splits: Sequence[int], *, offset_k: Tensor | None = None, offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None, quant_mode: int = 0,
    input_layout: str = "BSND", kv_output: bool = False, cache_mode: str = "contiguous", numerics: str = "fp32",
) -> _Result:  # fmt: skip
    """torch_npu.npu_dequant_rope_quant_kvcache on the CPU: its arguments, order, defaults and results.

    A test of NPU code changes one import. `numerics` is ours: "ascend" makes the roundings of the published NPU kernel (C7).
    """
    q, k, v = _op(
        x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, weight_scale, activation_scale,
        bias, quant_mode, input_layout, kv_output, cache_mode, numerics,
    )  # fmt: skip
    return q, k, v, k_cache, v_cache


def npu_rope_quant_kvcache(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, scale_k: Tensor, scale_v: Tensor,
    size_splits: Sequence[int], *, offset_k: Tensor | None = None, offset_v: Tensor | None = None, quant_mode: int = 0,
    input_layout: str = "BSND", kv_output: bool = False, cache_mode: str = "contiguous", numerics: str = "fp32",
) -> _Result:  # fmt: skip
    """torch_npu.npu_rope_quant_kvcache on the CPU: x is of the dtype of cos. Otherwise as npu_dequant_rope_quant_kvcache."""
    if getattr(x, "dtype", None) is torch.int32:  # the op would ask for weight_scale
        raise TypeError("x: expected the dtype of cos, got int32, which npu_dequant_rope_quant_kvcache takes")
    q, k, v = _op(
        x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, None, None, None, quant_mode,
        input_layout, kv_output, cache_mode, numerics,
    )  # fmt: skip
    return q, k, v, k_cache, v_cache


def plan(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, scale_k: Tensor, scale_v: Tensor,
    size_splits: Sequence[int], *, offset_k: Tensor | None = None, offset_v: Tensor | None = None,
    weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None,
    positions: Tensor | None = None, quant_mode: int | str = 0, input_layout: str = "BSND", kv_output: bool = False,
    cache_mode: str = "contiguous", numerics: str = "fp32", padding_index: int | None = None, allow_duplicates: bool = False,
    vendor_limits: bool = False, out: Sequence[Tensor | None] | None = None, num_threads: int | None = None,
    isa: str | None = None,
) -> Plan:  # fmt: skip
    """kvquant.plan for CPU tensors: plan.run takes and returns tensors, without PyTorch's dispatcher.

    So it is the fastest way to call the operator from eager code, and invisible to torch.compile, profilers and tensor subclasses.
    `out` is (q, k, v), tensors to write to, None for those to allocate.
    """
    return _core.tensor_plan(
        x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k=offset_k, offset_v=offset_v,
        weight_scale=weight_scale, activation_scale=activation_scale, bias=bias, positions=positions, quant_mode=quant_mode,
        input_layout=input_layout, kv_output=kv_output, cache_mode=cache_mode, numerics=numerics, padding_index=padding_index,
        allow_duplicates=allow_duplicates, vendor_limits=vendor_limits, out=out, num_threads=num_threads, isa=isa,
    )  # fmt: skip

"""kvquant.torch: the bytes of the reference from tensors that are never copied, as an op that passes PyTorch's own checks."""

import functools
import inspect
import subprocess
import sys
from pathlib import Path

import kvquant
import numpy as np
import pytest
from cases import OPTIONS, PAIRS, Case, all_pairs, build, difference
from test_leaks import resident

torch = pytest.importorskip("torch", reason="needs PyTorch", exc_type=ImportError)
import kvquant.torch  # noqa: E402

OP = torch.ops.kvquant.dequant_rope_quant_kvcache
# What tensors cannot have: negative strides, strides that are no whole number of elements. `out` belongs to plans.
LAYOUTS = OPTIONS | {
    "layout": [layout for layout in OPTIONS["layout"] if layout != "reversed"],
    "inputs": [inputs for inputs in OPTIONS["inputs"] if inputs != "reversed"],
    "vectors": ("dense", "padded"), "odd": (False,), "out": (None,), "dim": (2, 34, 64, 130), "tokens": (0, 1, 3, 9, 64)}  # fmt: skip


def tensor(array):
    """A tensor of the array's memory."""
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return tensor(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.writeable:  # stride 0, which only operands that are read have
        return torch.from_numpy(np.lib.stride_tricks.as_strided(array, writeable=True))
    return torch.from_numpy(array)


def array(tensor):
    return tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def tensors(built, **more):
    """The arguments of a built case as tensors of its buffers."""
    given = {name: tensor(value) for name, value in built.arguments.items() if name != "out"}
    return given | more


def run_tensors(built, function, **more):
    """What a call with tensors leaves behind, as Built.observe sees it."""
    built.restore()
    given = tensors(built, **more)
    q, k, v, k_cache, v_cache = function(**given)
    assert k_cache is given["k_cache"] and v_cache is given["v_cache"]
    results = [array(result).view(built.arguments["cos"].dtype) for result in (q, k, v)]
    return built.observe((*results, built.arguments["k_cache"], built.arguments["v_cache"]))


@functools.cache
def cases(pair):
    rows = [{"dim": dim, "tokens": tokens} for dim in LAYOUTS["dim"] for tokens in LAYOUTS["tokens"]]
    rng = np.random.default_rng(PAIRS.index(pair))
    return [build(Case(pair=pair, seed=seed, **row)) for seed, row in enumerate(all_pairs(LAYOUTS, rows, rng))]


def small(pair=("int32", "float16"), **options):
    """A call that uses every operand."""
    case = {"tokens": 6, "rank": 2, "dim": 32, "cache_mode": "page", "offsets": "both", "kv_output": True, "bias": "float32",
            "activation_scale": True}  # fmt: skip
    return build(Case(pair=pair, **case | options))


def split(given, op):
    """Positional and keyword arguments of an overload of the op, which may have fewer than `given`."""
    given = {a.name: given[a.name] for a in op._schema.arguments if given.get(a.name) is not None}
    return tuple(given.pop(a.name) for a in op._schema.arguments if not a.has_default_value()), given


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["exchange", "attributes"])
def reader(request):
    """Both ways to read tensors: DLPack's exchange API and attributes."""
    names = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    types = {name: getattr(torch, name) for name in names}
    functions = (torch.Tensor, torch.is_grad_enabled, torch.autograd.forward_ad, torch.autograd.graph.increment_version)
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if request.param == "exchange":
        assert kvquant._core.use_tensors(*functions, types, capsule)
    else:
        assert not kvquant._core.use_tensors(*functions, types, None)
    yield
    kvquant._core.use_tensors(*functions, types, capsule)


def test_same_bytes_as_the_reference(pair, isa, reader):
    for built in cases(pair):
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        got = run_tensors(built, kvquant.torch.dequant_rope_quant_kvcache, isa=isa)
        assert difference(expected, got) is None, difference(expected, got)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS["layout"] if layout != "contiguous"])
def test_strided_caches_and_inference_mode(layout, pair):
    some = (small(pair, layout=layout, seed=seed) for seed in range(9))
    built = next(built for built in some if not tensors(built)["k_cache"].is_contiguous())
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    with torch.inference_mode():
        assert difference(expected, run_tensors(built, kvquant.torch.dequant_rope_quant_kvcache)) is None
    with torch.no_grad():
        assert difference(expected, run_tensors(built, kvquant.torch.dequant_rope_quant_kvcache, quant_mode="static")) is None


def test_subclasses_such_as_parameters_are_tensors():
    built = small()
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    for name in ("weight_scale", "bias"):
        scale = torch.nn.Parameter(tensor(built.arguments[name]))
        with torch.no_grad():  # gradients are off, so that requires_grad promises nothing
            assert difference(expected, run_tensors(built, kvquant.torch.dequant_rope_quant_kvcache, **{name: scale})) is None


def test_lazy_negation():
    """A tensor that is minus what its memory holds: the dispatcher resolves it, a plan refuses it."""
    given = tensors(small(("float32", "float32")))
    expected = kvquant.torch.dequant_rope_quant_kvcache(**given | {"x": -given["x"]})[0]
    lazy = given | {"x": torch._neg_view(given["x"])}
    assert torch.equal(kvquant.torch.dequant_rope_quant_kvcache(**lazy)[0], expected)
    with pytest.raises(ValueError, match="^x: .*is_neg"):
        kvquant.torch.plan(**lazy)


def test_autograd_sees_that_the_caches_changed():
    given = tensors(small())
    before = given["k_cache"]._version, given["v_cache"]._version
    kvquant.torch.dequant_rope_quant_kvcache(**given)
    kvquant.torch.plan(**given).run()
    assert (given["k_cache"]._version, given["v_cache"]._version) == (before[0] + 2, before[1] + 2)


def test_results_are_ordinary_tensors(pair):
    """Aligned, contiguous memory of their own, which outlives the operands and goes with the last tensor that shares it."""
    given = tensors(small(pair, tokens=64))
    results = kvquant.torch.dequant_rope_quant_kvcache(**given)[:3]
    bytes_ = [array(result).tobytes() for result in results]
    del given
    views = [result.flatten()[1:] for result in results]
    for result in results:
        assert type(result) is torch.Tensor and result.is_contiguous() and result.data_ptr() % 64 == 0 and result._version == 0
        assert not result.requires_grad and result.storage_offset() == 0
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
    del results
    item = views[0].element_size()
    assert [array(view).tobytes() for view in views] == [all_[item:] for all_ in bytes_]


def test_memory_of_results_is_freed():
    given = tensors(small(tokens=64, dim=130))

    def resident_after(calls):
        for _ in range(calls):
            results = kvquant.torch.dequant_rope_quant_kvcache(**given)[:3]
        return resident(), sum(result.nbytes for result in results)

    (before, _), (after, bytes_) = resident_after(100), resident_after(2000)
    assert after - before < 200 * bytes_


def test_no_memory_for_results():
    """2**52 bytes of q, more than the address space holds, from one row of x."""
    given = tensors(small(("float32", "float32"), tokens=1, heads=(16, 1), dim=1 << 16, duplicates=True))
    for name in ("x", "cos", "sin", "indices"):
        given[name] = given[name].expand(1 << 30, *given[name].shape[1:])
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises(MemoryError, match="no memory for a result of 4503599627370496 bytes"):
        kvquant.torch.dequant_rope_quant_kvcache(**given)
    assert torch.equal(before[0], given["k_cache"]) and torch.equal(before[1], given["v_cache"])


# torch_npu's functions -----------------------------------------------------------------------------------------------


def test_torch_npu_signatures():
    """Names, order, kinds and defaults; `numerics` at the end is ours."""
    common = "x cos sin k_cache v_cache indices scale_k scale_v size_splits".split()
    options = {"quant_mode": 0, "input_layout": "BSND", "kv_output": False, "cache_mode": "contiguous", "numerics": "fp32"}
    for function, tensors_ in (
        (kvquant.torch.npu_dequant_rope_quant_kvcache, "offset_k offset_v weight_scale activation_scale bias"),
        (kvquant.torch.npu_rope_quant_kvcache, "offset_k offset_v"),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == common
        keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert list(keywords.items()) == list((dict.fromkeys(tensors_.split()) | options).items())


@pytest.mark.parametrize("numerics", ["fp32", "ascend"])
def test_torch_npu_functions(numerics, pair):
    built = small(pair, numerics=numerics)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    for own in ("padding_index", "allow_duplicates", "num_threads"):
        del built.arguments[own]
    assert difference(expected, run_tensors(built, kvquant.torch.npu_dequant_rope_quant_kvcache)) is None
    for name in ("weight_scale", "activation_scale", "bias"):
        built.arguments.pop(name, None)
    if pair[0] == "int32":
        with pytest.raises(TypeError, match="^x: .*int32"):
            run_tensors(built, kvquant.torch.npu_rope_quant_kvcache)
    else:
        assert difference(expected, run_tensors(built, kvquant.torch.npu_rope_quant_kvcache)) is None


# As an op ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"rank": 3, "kv_output": False}, {"tables": "half"}, {"layout": "interleaved"}, {"tokens": 0}], ids=str
)
def test_opcheck(options, pair):
    given = tensors(small(pair, **options))
    for op in [OP.full] if "tables" in options else [OP.default, OP.full]:
        args, kwargs = split(given, op)
        torch.library.opcheck(op, args, kwargs)


def test_overloads_have_the_arguments_of_the_functions():
    """Names, order and defaults of torch_npu's function in `default`; in `full`, which leads to the kernel's, all of kvquant's."""
    default, full = ([(a.name, a.default_value) for a in op._schema.arguments] for op in (OP.default, OP.full))
    empty = inspect.Parameter.empty

    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [(p.name, None if p.default is empty else p.default) for p in found if p.name != "out"]

    assert default == parameters(kvquant.torch.npu_dequant_rope_quant_kvcache) == full[: len(default)]
    assert full == parameters(kvquant._core.tensor_call)
    assert sorted(full) == sorted(parameters(kvquant.dequant_rope_quant_kvcache)) == sorted(parameters(kvquant.torch.plan))
    assert kvquant.torch._full_only == {name for name, _ in full[len(default) :]}


def test_the_op_itself(pair):
    """By keyword, where options lead to the overload that has them, and all by position."""

    def by_keyword(**given):
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        return *OP(**given), given["k_cache"], given["v_cache"]

    def by_position(**given):
        values = {a.name: a.default_value for a in OP.full._schema.arguments} | given
        return *OP.full(*values.values()), given["k_cache"], given["v_cache"]

    for padding in (False, True):
        built = small(pair, padding=padding)
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        for function in (by_keyword, by_position):
            assert difference(expected, run_tensors(built, function)) is None


def test_transforms_are_warned_of():
    """torch.func hides from the op that its tensors require grad; PyTorch then warns, unless the op hides from autograd."""
    given = tensors(small(("float32", "float32")))
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        torch.func.grad(lambda x: kvquant.torch.dequant_rope_quant_kvcache(**given | {"x": x})[0].sum())(given["x"])


def test_fake_tensors_have_the_real_shapes(pair):
    for options in ({}, {"rank": 3}, {"kv_output": False}, {"tokens": 0}):
        given = tensors(small(pair, **options))
        real = kvquant.torch.dequant_rope_quant_kvcache(**given)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
            for a, b in zip(kvquant.torch.dequant_rope_quant_kvcache(**fake), real):
                assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(backend):
    """K and V in one cache, PyTorch operations before and after; the caches are written in place, without a clone.

    Except by aot_eager: it functionalises and leaves it to a later pass, which only inductor has, to write in place again.
    """
    torch._dynamo.reset()
    case = {"offsets": "both", "kv_output": True, "cache_mode": "page", "rank": 2, "dim": 32}

    def step(function, kv, a):
        x = a["x"] * 2
        q, k, v, *_ = function(
            x, a["cos"], a["sin"], kv[:, 0], kv[:, 1], a["indices"], a["scale_k"], a["scale_v"], a["size_splits"],
            offset_k=a["offset_k"], offset_v=a["offset_v"], kv_output=True, cache_mode="page")  # fmt: skip
        return q + 1, k, v, kv.amax()

    compiled = torch.compile(functools.partial(step, kvquant.torch.dequant_rope_quant_kvcache), fullgraph=True, backend=backend)
    for tokens in (5,) if backend == "inductor" else (5, 9):
        a = tensors(build(Case(pair=("bfloat16", "bfloat16"), tokens=tokens, **case)))
        kv = torch.randint(-128, 128, (2, 2, 16, *a["k_cache"].shape[2:]), dtype=torch.int8)
        a["indices"] = torch.randperm(32)[:tokens]
        kv_expected = kv.clone()
        expected = step(kvquant.torch.dequant_rope_quant_kvcache, kv_expected, a)
        compiled(kv.clone(), a)  # compiles
        with torch.profiler.profile(record_shapes=True) as profile:
            got = compiled(kv, a)
        assert torch.equal(kv, kv_expected)
        assert all(torch.equal(x, y) for x, y in zip(got, expected))
        copied = [event.input_shapes for event in profile.events() if event.name in ("aten::clone", "aten::copy_")]
        of_caches = [shapes for shapes in copied if any(len(shape) >= 4 or shape == [kv.numel()] for shape in shapes)]
        assert backend == "aot_eager" or not of_caches


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(kvquant.torch.dequant_rope_quant_kvcache, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 4, 9):
        built = small(tokens=tokens)
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        assert difference(expected, run_tensors(built, compiled)) is None


# Errors --------------------------------------------------------------------------------------------------------------


def contents(given):
    values = {name: value.detach() for name, value in given.items() if isinstance(value, torch.Tensor)}
    return {name: value.reshape(-1).view(torch.uint8).tolist() for name, value in values.items()
            if value.device.type == "cpu" and value.layout is torch.strided}  # fmt: skip


def refused(error, pattern, change, functions=(kvquant.torch.dequant_rope_quant_kvcache, kvquant.torch.plan)):
    """A call with these operands replaced raises and writes nothing. change: a dict, or a function of the good operands."""
    for function in functions:
        given = tensors(small())
        given |= change(given) if callable(change) else change
        before = contents(given)
        with pytest.raises(error, match=pattern):
            result = function(**given)
            if isinstance(result, kvquant.Plan):
                result.run()
        assert before == contents(given)


@pytest.mark.parametrize("name", ["cos", "sin", "scale_k", "scale_v", "offset_k", "offset_v", "weight_scale", "activation_scale",
                                  "bias"])  # fmt: skip
def test_a_tensor_that_requires_grad(name, reader):
    value = tensors(small())[name].clone().requires_grad_()
    refused(ValueError, f"^{name}: .*requires_grad", {name: value})


def test_float_x_that_requires_grad():
    given = tensors(small(("float32", "float32")))
    given["x"] = given["x"].clone().requires_grad_()
    with pytest.raises(ValueError, match="^x: .*requires_grad"):
        kvquant.torch.dequant_rope_quant_kvcache(**given)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="x: .*requires_grad"):
        torch.compile(kvquant.torch.dequant_rope_quant_kvcache, fullgraph=True, backend="aot_eager")(**given)


TENSORS = [name for name, value in small().arguments.items() if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device(name, reader):
    refused(ValueError, f"^{name}: expected a CPU tensor, got one on meta", {name: tensors(small())[name].to("meta")})


@pytest.mark.parametrize("name", TENSORS)
def test_zero_tensors(name, reader):
    """Zeros without memory: a plan refuses them; the dispatcher gives them memory, in which all elements are one."""
    given = tensors(small())
    zero = torch._efficientzerotensor(given[name].shape, dtype=given[name].dtype)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor with memory, got a zero tensor"):
        kvquant.torch.plan(**given | {name: zero})
    if name in ("weight_scale", "activation_scale", "bias", "offset_k", "offset_v"):
        results = [kvquant.torch.dequant_rope_quant_kvcache(**tensors(small()) | {name: value}) for value in (zero, zero.clone())]
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", ["x", "indices", "scale_k"])
def test_tensors_without_memory(name, reader):
    """Their address may be NULL or, in a view, no more than an offset."""
    given = tensors(small())
    for first in (0, 1):
        wider = torch.cat([given[name], given[name]])
        view = wider[first:len(given[name]) + first]
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor with memory"):
            torch.func.functionalize(lambda value: kvquant.torch.plan(**given | {name: value[first:]}))(wider)
        wider.untyped_storage().resize_(0)
        for function in (kvquant.torch.dequant_rope_quant_kvcache, kvquant.torch.plan):
            with pytest.raises(ValueError, match=f"^{name}: expected a tensor with memory"):
                function(**given | {name: view})


def test_forward_mode_differentiation(reader):
    """There is no derivative: no call that would lose one without a word."""
    def dual(given):
        return {"cos": torch.autograd.forward_ad.make_dual(given["cos"], torch.ones_like(given["cos"]))}

    with torch.autograd.forward_ad.dual_level():
        refused(ValueError, "^cos: expected a tensor without a tangent", dual)
        kvquant.torch.dequant_rope_quant_kvcache(**tensors(small()))


@pytest.mark.parametrize("change, pattern", [
    (lambda a: {"k_cache": a["k_cache"][0]}, "k_cache: expected 4 dimensions, got 3"),
    (lambda a: {name: a[name][..., :0] for name in ("k_cache", "v_cache")}, "k_cache: expected an even head size D"),
    (lambda a: {"size_splits": [-64, 64, 64]}, r"size_splits\[0\]: expected a length in columns, got -64"),
    (lambda a: {"size_splits": []}, "size_splits: expected 3 integers, got 0"),
])  # fmt: skip
def test_what_has_no_shape_to_infer(change, pattern):
    refused(ValueError, pattern, change)
    given = tensors(small())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        with pytest.raises(ValueError, match=pattern):
            kvquant.torch.dequant_rope_quant_kvcache(**fake | change(fake))


def test_what_float_x_does_not_look_at():
    given = tensors(small(("float32", "float32"))) | {"weight_scale": torch.zeros(3, requires_grad=True)}
    expected = [value.clone() for value in kvquant.torch.dequant_rope_quant_kvcache(**given)]
    got = torch.compile(kvquant.torch.dequant_rope_quant_kvcache, fullgraph=True, backend="aot_eager")(**given)
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_all_tensors_on_another_device():
    given = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in tensors(small()).items()}
    for function in (kvquant.torch.dequant_rope_quant_kvcache, kvquant.torch.plan):
        with pytest.raises(ValueError, match="^x: expected a CPU tensor, got one on meta"):
            function(**given)


def test_what_is_no_tensor():
    refused(RuntimeError, "'x'", {"x": small().arguments["x"]}, [kvquant.torch.dequant_rope_quant_kvcache])
    for value in (small().arguments["x"], [1, 2], None):
        refused(TypeError, "^x: expected a torch.Tensor, got ", {"x": value}, [kvquant.torch.plan])
    with pytest.raises(TypeError, match="^x: expected a numpy.ndarray, got Tensor"):
        kvquant.dequant_rope_quant_kvcache(**tensors(small()))
    with pytest.raises(TypeError, match="^x: expected a numpy.ndarray, got Tensor"):
        kvquant.plan(**tensors(small()))


@pytest.mark.parametrize(
    "error, pattern, change",
    [
        (TypeError, "^cos: .*float64", lambda a: {"cos": a["cos"].double()}),
        (TypeError, "^cos: .*complex", lambda a: {"cos": a["cos"].to(torch.complex64)}),
        (TypeError, "^bias: .*float8", lambda a: {"bias": a["bias"].to(torch.float8_e4m3fn)}),
        (TypeError, "^k_cache: .*uint8", lambda a: {"k_cache": a["k_cache"].view(torch.uint8)}),
        (TypeError, "^indices: .*int16", lambda a: {"indices": a["indices"].short()}),
        (TypeError, "^indices: .*bool", lambda a: {"indices": a["indices"].bool()}),
        (TypeError, "^weight_scale: required", lambda a: {"weight_scale": None}),
        (TypeError, "^x: .*", lambda a: {"x": a["x"].to_sparse()}),
        (ValueError, "^x: .*stride", lambda a: {"x": a["x"].t().contiguous().t()}),
        (ValueError, "^v_cache: .*stride", lambda a: {"v_cache": a["v_cache"].transpose(2, 3).contiguous().transpose(2, 3)}),
        (ValueError, "^k_cache: .*overlap|^k_cache: .*shared", lambda a: {"v_cache": a["k_cache"]}),
        (ValueError, "^k_cache: .*overlap", lambda a: {"k_cache": a["k_cache"][:1].expand(a["k_cache"].shape)}),
        (ValueError, r"^scale_v\[0\]: .*nan", lambda a: {"scale_v": torch.full((1,), float("nan"))}),
        (ValueError, "^numerics", lambda a: {"numerics": "exact"}),
        (ValueError, "^num_threads", lambda a: {"num_threads": 0}),
        (IndexError, r"^indices\[5\]: .*-1", lambda a: {"indices": torch.tensor([0, 1, 2, 3, 4, -1])}),
        (IndexError, r"^positions\[2\]: .*9", lambda a: {
            "positions": torch.tensor([0, 1, 9, 0, 0, 0]), "cos": a["cos"][:2], "sin": a["sin"][:2]}),
    ],
)  # fmt: skip
def test_refused_before_anything_is_written(error, pattern, change, reader):
    refused(error, pattern, change)


# Plans ---------------------------------------------------------------------------------------------------------------


def test_plan_runs_other_operands_and_sizes(pair, isa):
    built = small(pair, activation_scale=False)
    fixed = {name: built.arguments[name] for name in ("weight_scale", "bias", "scale_k", "scale_v", "offset_k", "offset_v")
             if name in built.arguments}  # fmt: skip
    plan = kvquant.torch.plan(**tensors(built), isa=isa)
    assert isa in plan.describe() and "page" in plan.describe()
    for tokens in (6, 0, 1, 33):
        other = small(pair, activation_scale=False, tokens=tokens)
        other.arguments |= fixed
        expected = other.run(kvquant.reference.dequant_rope_quant_kvcache)
        names = ("x", "cos", "sin", "k_cache", "v_cache", "indices")
        got = run_tensors(other, lambda **given: plan.run(**{name: given[name] for name in names}))
        assert difference(expected, got) is None


def test_plan_writes_to_out_and_refuses_arrays():
    built = small()
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    built.restore()
    plan = kvquant.torch.plan(**tensors(built))
    q, k, v, *_ = kvquant.torch.dequant_rope_quant_kvcache(**tensors(built))
    out = [torch.zeros_like(result) for result in (q, k, v)]
    built.restore()
    result = plan.run(out=out)
    assert all(given is got for given, got in zip(out, result))
    assert [tensor._version for tensor in out] == [1, 1, 1]  # what autograd saved of them has changed
    caches = (built.arguments["k_cache"], built.arguments["v_cache"])
    assert difference(expected, built.observe((*map(array, out), *caches))) is None
    with pytest.raises(TypeError, match="^indices: expected a torch.Tensor, got ndarray"):
        plan.run(built.arguments["indices"])
    with pytest.raises(ValueError, match="^q: "):
        plan.run(out=(torch.zeros_like(q)[:3], None, None))


# Examples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["torch_layer.py"], ["tensor_parallel.py", "2"], ["tensor_parallel.py", "4"]], ids=" ".join)
def test_example(arguments):
    """Each checks its own bytes; the second starts that many gloo ranks, each with its own heads of x, scales and cache."""
    script, *others = arguments
    path = Path(__file__).parents[1] / "examples" / script
    done = subprocess.run([sys.executable, path, *others], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout

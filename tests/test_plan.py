"""kvquant.plan: metadata checked once, values read anew by each run, operands given to run held for that run only."""

import copy
import pickle
import threading

import kvquant
import numpy as np
import pytest
from cases import OPTIONS, Case, build, difference

CASE = {
    "tokens": 9,
    "dim": 34,
    "cache_mode": "page",
    "offsets": "both",
    "kv_output": True,
    "activation_scale": True,
    "bias": "float32",
    "rank": 2,
}
# What run may replace.
OPERANDS = ("x", "cos", "sin", "k_cache", "v_cache", "indices", "scale_k", "scale_v", "offset_k", "offset_v",
            "weight_scale", "activation_scale", "bias")  # fmt: skip


def options_of(built):
    """The arguments of a built case without num_threads, which would only repeat the default."""
    return {name: value for name, value in built.arguments.items() if name != "num_threads"}


def planned(built, isa):
    return kvquant.plan(**options_of(built), isa=isa)


def expected_of(built):
    return built.run(kvquant.reference.dequant_rope_quant_kvcache)


def run_again(plan, built, **more):
    built.restore()
    return built.observe(plan.run(**more))


@pytest.mark.parametrize("out", OPTIONS["out"])
def test_same_bytes_as_the_function_each_time(out, pair, isa):
    built = build(Case(pair=pair, out=out, data="special", **CASE))
    expected = expected_of(built)
    built.restore()
    plan = planned(built, isa)
    for _ in range(3):
        assert difference(expected, run_again(plan, built)) is None
    assert difference(expected, run_again(plan, built, indices=built.arguments["indices"])) is None


def test_plan_writes_nothing_and_reads_no_values(pair, isa):
    built = build(Case(pair=pair, out="contiguous", **CASE))
    arguments = built.arguments
    good = {name: arguments[name].copy() for name in ("indices", "scale_k", "offset_v")}
    arguments["indices"][...] = 10**6
    arguments["scale_k"][...] = 0
    arguments["offset_v"][...] = np.nan
    before = {name: buffer.copy() for name, buffer in built.buffers.items()}
    plan = planned(built, isa)  # values that no call would take
    assert isinstance(plan.describe(), str) and plan.describe()
    with pytest.raises((IndexError, ValueError)):
        plan.run()
    assert all(np.array_equal(before[name], buffer) for name, buffer in built.buffers.items())
    for name, value in good.items():  # now they are good, and the plan sees it
        arguments[name][...] = value
    built.freeze()
    assert difference(expected_of(built), run_again(plan, built)) is None


def test_values_are_read_anew(isa):
    built = build(Case(**CASE))
    plan = planned(built, isa)
    for seed in range(3):
        other = build(Case(seed=seed + 1, **CASE))
        for name in OPERANDS:
            if built.arguments[name].shape == other.arguments[name].shape:
                built.arguments[name][...] = other.arguments[name]
        rows = np.prod(built.arguments["k_cache"].shape[:2])
        built.arguments["indices"][...] = np.random.default_rng(seed).permutation(rows)[:9]
        built.freeze()
        assert difference(expected_of(built), run_again(plan, built)) is None


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_given_to_run_holds_for_that_run(name, isa):
    built, other = (build(Case(seed=seed, **CASE)) for seed in (1, 2))
    plan = planned(built, isa)
    replacement = other.arguments[name]
    if name in ("k_cache", "v_cache"):
        replacement = built.arguments[name].copy()
    elif name == "indices":
        replacement = built.arguments[name][::-1].copy()
    changed = {**built.arguments, name: replacement}
    built.restore()
    expected = [array.copy() for array in kvquant.reference.dequant_rope_quant_kvcache(**changed)]
    if name in ("k_cache", "v_cache"):
        replacement[...] = np.frombuffer(built.before[name][: replacement.size], np.int8).reshape(replacement.shape)
    built.restore()
    got = plan.run(**{name: replacement})
    for a, b in zip(expected, got):
        assert a.tobytes() == b.tobytes()
    assert (got[3] if name == "k_cache" else got[4] if name == "v_cache" else replacement) is replacement
    assert difference(expected_of(built), run_again(plan, built)) is None  # the plan's own operands are back


def test_another_number_of_tokens_for_one_run(pair, isa):
    """T, pointers and strides belong to the run."""
    built = build(Case(pair=pair, **{**CASE, "activation_scale": False}))
    plan = planned(built, isa)
    for tokens in (0, 1, 4, 33):
        other = build(Case(pair=pair, inputs="reversed", vectors="reversed", odd=True, **{**CASE, "activation_scale": False, "tokens": tokens}))
        fixed = ("weight_scale", "bias", "scale_k", "scale_v", "offset_k", "offset_v")
        other.arguments |= {name: built.arguments[name] for name in fixed if name in built.arguments}
        expected = expected_of(other)
        names = ("x", "cos", "sin", "k_cache", "v_cache", "indices")
        given = {name: other.arguments[name] for name in names}
        assert difference(expected, run_again(plan, other, **given)) is None, tokens
    assert difference(expected_of(built), run_again(plan, built)) is None


def test_outputs_given_to_run(isa):
    built = build(Case(**CASE))
    plan = planned(built, isa)
    expected = expected_of(built)
    shapes = [np.empty_like(array) for array in plan.run()[:3]]
    built.restore()
    result = plan.run(out=tuple(shapes))
    assert all(given is got for given, got in zip(shapes, result))
    assert difference(expected, built.observe(result)) is None
    assert plan.run()[0] is not shapes[0]


@pytest.mark.parametrize(
    "change, error, pattern",
    [
        ({"indices": [1, 2, 3]}, TypeError, r"\bindices\b"),
        ({"indices": np.zeros(8, np.int64)}, ValueError, r"\bindices\b"),
        ({"indices": np.full(9, -1, np.int64)}, IndexError, r"^indices\[0\]"),
        ({"indices": np.zeros(9, np.int64)}, ValueError, r"^indices\[1\]"),
        ({"scale_v": np.zeros(1, np.float32)}, ValueError, r"^scale_v\[0\]"),
        ({"x": np.zeros((9, 8), np.int32)}, ValueError, r"\b(x|size_splits)\b"),
        ({"cos": np.zeros((9, 34), np.float64)}, TypeError, r"\bcos\b"),
        ({"out": 5}, ValueError, r"\bout\b"),
    ],
)
def test_a_run_with_a_fault_changes_nothing(change, error, pattern, isa):
    built = build(Case(**CASE))
    plan = planned(built, isa)
    with pytest.raises(error, match=pattern):
        plan.run(**change)
    assert all(np.array_equal(built.before[name], buffer) for name, buffer in built.buffers.items())
    assert difference(expected_of(built), run_again(plan, built)) is None


def test_plan_raises_errors_of_metadata():
    for change, error, pattern in (
        ({"cos": None}, TypeError, r"\bcos\b"),
        ({"numerics": "exact"}, ValueError, r"\bnumerics\b"),
        ({"num_threads": 0}, ValueError, r"\bnum_threads\b"),
        ({"size_splits": [1, 2, 3]}, ValueError, r"\bsize_splits\b"),
        ({"isa": "sse9"}, ValueError, r"\bisa\b"),
    ):
        with pytest.raises(error, match=pattern):
            kvquant.plan(**{**build(Case(**CASE)).arguments, **change})


def test_describe():
    built = build(Case(**CASE))
    text = planned(built, "scalar").describe()
    for part in ("int32 x to float16 q, k and v", "B=9 S=1 Nq=4 Nkv=2 D=34", "float32 bias", "rows of each token", "fp32 numerics",
                 "page cache", "isa scalar", "threads auto"):  # fmt: skip
        assert part in text, text
    row = 8 * 34
    assert f"reads {9 * (row * 4 + 2 * 34 * 2)} bytes" in text and f"writes {9 * (row * 2 + 2 * 2 * 34)} bytes" in text
    built = build(Case(**CASE | {"bias": None, "tables": "half", "padding": True, "kv_output": False, "cache_mode": "contiguous"}))
    text = kvquant.plan(**built.arguments).describe()
    for part in ("float16 q,", "no bias", "tables at positions", "contiguous cache", "except index -1",
                 f"isa {kvquant.isa.active()}"):  # fmt: skip
        assert part in text, text
    assert f"reads {9 * (row * 4 + 34 * 2)} bytes" in text


def test_copies():
    """A plan cannot change, so that a copy is the plan; it refers to memory, which a pickle or a deep copy cannot."""
    plan = planned(build(Case(**CASE)), None)
    assert copy.copy(plan) is plan
    for refuse in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Plan refers to the memory of its operands"):
            refuse(plan)


def test_one_plan_on_many_threads(isa):
    """Each thread brings its own caches and outputs; the plan is shared."""
    built = build(Case(**CASE))
    plan = planned(built, isa)
    expected = expected_of(built)
    built.restore()
    start = built.arguments["k_cache"].copy(), built.arguments["v_cache"].copy()
    failures = []

    def work():
        for _ in range(20):
            k_cache, v_cache = (cache.copy() for cache in start)
            got = plan.run(k_cache=k_cache, v_cache=v_cache)
            same = [array.tobytes() for array in got[:3]] == [expected[name][2] for name in ("q", "k", "v")]
            rows = expected["buffer of k_cache"], expected["buffer of v_cache"]
            if not (same and rows[0].startswith(k_cache.tobytes()) and rows[1].startswith(v_cache.tobytes())):
                failures.append(same)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("use", [
    lambda plan: plan(1, 2), lambda plan: plan.__new__(plan).run(), lambda plan: plan.__new__(plan).describe(),
    lambda plan: plan.run(None), lambda plan: plan.run(5), lambda plan: plan.describe(None),
])  # fmt: skip
def test_only_plan_makes_a_plan(use):
    with pytest.raises(TypeError, match="Plan"):
        use(kvquant.Plan)


def test_a_changed_array_is_read_anew():
    """run() skips reading metadata only while every bound array is where and what it was."""
    built = build(Case(**CASE))
    arguments = options_of(built)
    plan = planned(built, None)
    expected = expected_of(built)
    indices = arguments["indices"]
    built.restore()
    for same in (indices.copy(), indices.astype(np.int64), np.repeat(indices, 2)[::2]):
        assert difference(expected, run_again(plan, built, indices=same)) is None
    indices.shape = (3, 3)
    with pytest.raises(ValueError, match="indices"):
        plan.run()
    indices.shape = (9,)
    assert difference(expected, run_again(plan, built)) is None
    arguments["v_cache"].setflags(write=False)
    with pytest.raises(ValueError, match="v_cache"):
        plan.run()

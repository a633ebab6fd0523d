"""Nothing is kept: memory stays flat over a million calls, and every object has as many references after a call or an error as
before it."""

import gc
import sys

import kvquant
import numpy as np
import pytest
from cases import TYPES, Case, build
from test_errors import FAULTS, good

MILLION = 1_000_000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.fixture
def calls():
    """Ways to use the operator, each with the weight that it has among the million."""
    small = build(Case(tokens=1, dim=64, rank=2, cache_mode="page", kv_output=True, offsets="both", bias="float32")).arguments
    with_out = small | {"out": kvquant.plan(**small).run()[:3]}
    large = build(Case(tokens=2000, dim=2, rank=2, heads=(1, 1), cache_mode="page")).arguments  # workspace by malloc
    bad_index = large | {"indices": large["indices"].copy(), "num_threads": 2}
    bad_index["indices"][-1] = -7
    plan = kvquant.plan(**small)
    x = np.array(small["x"])

    def refused(error, **arguments):
        def work():
            try:
                kvquant.dequant_rope_quant_kvcache(**arguments)
            except error:
                return
            raise AssertionError("no error")

        return work

    return [
        (0.38, lambda: kvquant.dequant_rope_quant_kvcache(**with_out)),
        (0.2, lambda: kvquant.dequant_rope_quant_kvcache(**small)),
        (0.2, plan.run),
        (0.12, lambda: plan.run(x=x, out=with_out["out"])),
        (0.01, lambda: kvquant.plan(**small)),
        (0.001, lambda: kvquant.dequant_rope_quant_kvcache(**large)),
        (0.001, refused(IndexError, **bad_index)),
        (0.03, refused(TypeError, **small | {"cos": small["cos"].astype(np.float64)})),
        (0.03, refused(ValueError, **small | {"scale_k": np.zeros(1, np.float32)})),
        (0.028, refused(ValueError, **small | {"isa": "sse9"})),
    ]


def test_memory_is_flat_over_a_million_calls(calls):
    def make(total):
        for weight, work in calls:
            for _ in range(round(weight * total)):
                work()

    assert round(sum(weight for weight, _ in calls), 6) == 1
    make(20_000)  # caches and arenas reach their size
    gc.collect()
    blocks, memory = sys.getallocatedblocks(), resident()
    make(MILLION)
    gc.collect()
    assert abs(sys.getallocatedblocks() - blocks) < 100
    # One byte lost in each call would be twice that.
    assert resident() - memory < 512 << 10


def test_code_that_runs_while_arguments_are_read():
    """A subclass whose __class__ is code could change operands already looked at, or find a plan that is not made yet."""
    ran = []

    class Hooked(np.ndarray):
        @property
        def __class__(self):
            ran.append(self)
            return Hooked

    given = build(Case(tokens=8, dim=64, rank=2, cache_mode="page", kv_output=True)).arguments
    hooked = given | {name: given[name].view(Hooked) for name in ("k_cache", "indices", "scale_v")}
    expected = kvquant.dequant_rope_quant_kvcache(**given)
    for results in (kvquant.dequant_rope_quant_kvcache(**hooked), kvquant.plan(**hooked).run()):
        assert [result.tobytes() for result in results] == [result.tobytes() for result in expected]
    assert not ran
    with pytest.raises(TypeError, match="masked"):
        kvquant.plan(**given | {"sin": np.ma.masked_array(given["sin"])})


def test_large_results_are_aligned_and_freed():
    """From 64 KiB on a result begins at a multiple of 64 bytes, and its memory goes with the last array that shares it."""
    given = build(Case(tokens=64, dim=130, rank=2, cache_mode="page", kv_output=True, heads=(8, 8))).arguments

    def resident_after(count):
        for _ in range(count):
            results = kvquant.dequant_rope_quant_kvcache(**given)[:3]
        return resident(), results

    before, results = resident_after(100)
    for result in results:
        assert result.nbytes >= 65536 and result.ctypes.data % 64 == 0
        assert result.flags.c_contiguous and result.flags.writeable and type(result) is np.ndarray
    tails, expected = [result.reshape(-1)[1:] for result in results], [result.tobytes() for result in results]
    del results
    after, _ = resident_after(2000)
    assert after - before < 200 * sum(map(len, expected))
    assert [tail.tobytes() for tail in tails] == [bytes_[tail.itemsize :] for tail, bytes_ in zip(tails, expected)]


def references(arguments):
    """How often each object of a call is referred to; and the types' descriptors, which outputs share."""
    out = arguments["out"] if isinstance(arguments["out"], tuple) else ()
    objects = [*arguments.values(), *out, *TYPES.values()]
    shared = (type(None), bool, int, str, tuple)  # the interpreter has references of its own to some of them
    return [sys.getrefcount(item) for item in objects if not isinstance(item, shared)]


@pytest.mark.parametrize("out", [None, "contiguous", "some"])
def test_references_after_calls(out, pair, isa):
    built = build(Case(pair=pair, tokens=5, dim=34, kv_output=True, offsets="both", bias="float32", out=out))
    arguments = built.arguments | {"isa": isa}
    before = references(arguments)
    for _ in range(20):
        kvquant.dequant_rope_quant_kvcache(**arguments)
    assert references(arguments) == before
    plan = kvquant.plan(**arguments)
    for _ in range(20):
        plan.run()
        plan.run(x=arguments["x"], out=arguments["out"])
    del plan
    assert references(arguments) == before


@pytest.mark.parametrize("number", range(20))
def test_references_after_errors(number):
    """Every error of test_errors.py."""
    refused = 0
    for fault in FAULTS[number::20]:
        error, _, change = fault.values
        arguments = good()
        arguments |= change(arguments)
        before = references(arguments)
        for _ in range(3):
            try:
                kvquant.dequant_rope_quant_kvcache(**arguments)
            except error:
                refused += 1
        assert references(arguments) == before, fault.id
    assert refused > 100

"""Calls without `isa=`, one after another: what is remembered of a call's metadata must not reach the next one that differs."""

import kvquant
import numpy as np
import pytest
from cases import OPTIONS, PAIRS, Case, all_pairs, build, difference
from test_errors import ACCEPTED, EXPECTED, FAULTS, good, hashes, observed

call = kvquant.dequant_rope_quant_kvcache


@pytest.mark.parametrize("number", range(20))
def test_each_fault_right_after_the_good_call(number):
    """The same arrays but for the fault, so that all that can be remembered is."""
    for fault in FAULTS[number::20]:
        error, pattern, change = fault.values
        for _ in range(2):
            assert observed(call(**good())) == EXPECTED
        arguments = good()
        arguments |= change(arguments)
        before = hashes(arguments)
        for _ in range(2):
            with pytest.raises(error, match=pattern):
                call(**arguments)
        assert hashes(arguments) == before, fault.id


@pytest.mark.parametrize("label", ACCEPTED)
def test_each_other_form_right_after_the_good_call(label):
    arguments = good()
    arguments |= ACCEPTED[label](arguments)
    for given in (good(), arguments, good(), arguments, arguments):
        fresh = {name: value.copy() if name in ("k_cache", "v_cache") else value for name, value in given.items()}
        assert observed(call(**fresh)) == EXPECTED


def test_arrays_that_change_between_calls():
    """The same objects with other flags, shapes, strides or memory."""
    arguments = good(out=None)
    call(**arguments)
    arguments["k_cache"].flags.writeable = False
    with pytest.raises(ValueError, match="^k_cache.*read-only"):
        call(**arguments)
    arguments["k_cache"].flags.writeable = True
    assert observed(call(**arguments | {"k_cache": good()["k_cache"], "v_cache": good()["v_cache"]})) == EXPECTED
    arguments["scale_k"].shape = (-1,)
    assert observed(call(**arguments | {"k_cache": good()["k_cache"], "v_cache": good()["v_cache"]})) == EXPECTED
    arguments["x"].shape = (-1, arguments["x"].shape[-1])
    with pytest.raises(ValueError, match="cos|x"):
        call(**arguments)
    with pytest.raises(ValueError, match="_cache"):  # the metadata of the good call, in memory that overlaps
        call(**good() | {"v_cache": arguments["k_cache"], "k_cache": arguments["k_cache"]})


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_calls_in_turn(pair):
    """Neighbours that share as many options as possible, back and forth."""
    rows = all_pairs({"dim": (16, 34), "tokens": (0, 1, 5)} | OPTIONS, [], np.random.default_rng(6))
    built = [build(Case(pair=pair, **row)) for row in rows[:60]]
    expected = [one.run(kvquant.reference.dequant_rope_quant_kvcache) for one in built]
    order = np.random.default_rng(7).integers(0, len(built), 400)
    for i in [*order, *np.repeat(order[:50], 2)]:
        assert difference(expected[i], built[i].run(call)) is None, rows[i]
    for one, seen, row in zip(built, expected, rows):  # one option at a time changes
        for name, value in (("kv_output", not row["kv_output"]), ("numerics", "ascend"), ("allow_duplicates", True)):
            if name == "kv_output" and row["out"] is not None or name == "allow_duplicates" and not row["duplicates"]:
                continue
            assert difference(seen, one.run(call)) is None
            other = one.run(kvquant.reference.dequant_rope_quant_kvcache, **{name: value})
            assert difference(other, one.run(call, **{name: value})) is None

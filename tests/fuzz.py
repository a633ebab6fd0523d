"""Differential fuzzer: random calls, each instruction set against the NumPy reference, in one call and cut into several.

    python tests/fuzz.py [--seconds 20] [--seed 0] [--jobs 2]     fuzz; prints what came out, exit code 1 on a difference
    python tests/fuzz.py --seed 0 --case 1234                     one case again

Shapes, strides, layouts and options are drawn freely, values at edges and on rounding ties. About one case in eight has a
fault in one operand: every implementation must raise the same exception and write nothing. A case follows from seed and
number alone.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass

import kvquant
import numpy as np
from cases import DIMS, OPTIONS, PAIRS, Case, build, difference, narrow, ulps

SMALL_DIMS = tuple(dim for dim in DIMS if dim <= 66)


@dataclass
class Drawn:
    """A call to make: `built` holds the operands, `fault` says what is wrong with them (None: nothing), `good` what they were."""

    case: Case
    good: dict
    built: object
    fault: object
    rng: object


def draw(seed, number):
    rng = np.random.default_rng((seed, number))

    def pick(choices):
        return choices[int(rng.integers(len(choices)))]

    options = {name: pick(choices) for name, choices in OPTIONS.items()}
    options["dim"] = pick(SMALL_DIMS if rng.random() < 0.9 else DIMS)
    options["tokens"] = int(rng.integers(1, 12)) if rng.random() < 0.9 else pick((0, 16, 17, 33, 64))
    options["num_threads"] = pick((1, 1, 1, 2, 3, None))
    options["data"] = pick(("plain", "special", "ties", "ties"))
    case = Case(pair=pick(PAIRS), seed=int(rng.integers(2**31)), **options)
    built = build(case)
    if rng.random() < 0.5:
        put_on_ties(case, built.arguments, rng)
    good = dict(built.arguments)
    fault = plant(built.arguments, rng) if rng.random() < 0.125 else None
    return Drawn(case, good, built.freeze(), fault, rng)


def put_on_ties(case, a, rng):
    """K and V where value / scale + offset lies on the middle between two codes or a few units beside it."""
    heads, dim = a["k_cache"].shape[2:]
    columns = heads * dim
    if case.pair[0] == "int32" and (a.get("bias") is not None or a.get("activation_scale") is not None):
        return
    a["cos"], a["sin"] = (narrow(np.full(a["cos"].shape, value), case.pair[1]) for value in (1, 0))
    for name, columns_of in (("k", slice(-2 * columns, -columns)), ("v", slice(-columns, None))):
        scale, offset = (per_column(a.get(f"{what}_{name}"), heads, dim) for what in ("scale", "offset"))
        if scale is None or offset is None:
            offset = np.zeros(columns, np.float32)
        codes = rng.integers(-130, 130, columns) + np.float32(0.5)
        with np.errstate(all="ignore"):
            values = ulps((codes - offset) * scale, rng.integers(-2, 3, columns).astype(np.int32))
            if case.pair[0] == "int32":
                a["weight_scale"][columns_of] = values
                a["x"][..., columns_of] = rng.choice(np.array([1, 1, -1, 0], np.int32), a["x"][..., columns_of].shape)
            else:
                a["x"][..., columns_of] = narrow(values, case.pair[0])


def per_column(array, heads, dim):
    if array is None:
        return None
    shaped = array.reshape(heads, dim) if array.size == heads * dim else array
    return np.broadcast_to(shaped, (heads, dim)).ravel()


def plant(a, rng):
    """Spoil one operand; returns what was done."""
    names = [name for name, value in a.items() if isinstance(value, np.ndarray)]
    name = names[int(rng.integers(len(names)))]
    kind = ("value", "value", "value", "type", "shape", "swapped", "stride", "list", "overlap", "read-only")[int(rng.integers(10))]
    array = a[name]
    if kind == "value":
        name = ("indices", "positions", "scale_k", "scale_v", "offset_k", "offset_v")[int(rng.integers(6))]
        if a.get(name) is None or not a[name].size:
            return None
        bad = (-(2**31), -2, 2**31 - 1, 10**6) if name in ("indices", "positions") else (np.nan, np.inf, -np.inf)
        if name.startswith("scale"):
            bad += (0.0, -0.0)
        a[name] = np.array(a[name])
        a[name].reshape(-1)[int(rng.integers(a[name].size))] = bad[int(rng.integers(len(bad)))]
    elif kind == "type":
        with np.errstate(all="ignore"):
            a[name] = array.astype((np.float64, np.int16, np.uint8, np.complex64)[int(rng.integers(4))])
    elif kind == "shape":
        axis = int(rng.integers(array.ndim)) if array.ndim else 0
        grown = np.repeat(np.atleast_1d(array), 3, axis)
        a[name] = grown if rng.random() < 0.5 else grown[np.newaxis]
    elif kind == "swapped":
        a[name] = array.astype(array.dtype.newbyteorder())
    elif kind == "stride":
        a[name] = np.repeat(array, 2, -1)[..., ::2] if array.ndim else array
    elif kind == "list":
        a[name] = array.tolist()
    elif kind == "overlap":
        a["v_cache"] = a["k_cache"]
    else:
        name = ("k_cache", "v_cache")[int(rng.integers(2))]
        a[name] = a[name].view()
        a[name].flags.writeable = False
    return f"{kind} {name}"


# Making calls --------------------------------------------------------------------------------------------------------


def outcome(built, function, **more):
    """(exception or None, what is seen afterwards)."""
    built.restore()
    try:
        with np.errstate(all="ignore"):
            result = function(**{**built.arguments, **more})
    except (TypeError, ValueError, IndexError) as error:
        return error, {name: buffer.tobytes() for name, buffer in built.buffers.items()}
    return None, built.observe(result)


def pieces(drawn):
    """Cuts of the batches: first and last of each piece."""
    batches = drawn.built.arguments["x"].shape[0]
    cuts = np.unique(drawn.rng.integers(0, batches + 1, int(drawn.rng.integers(0, 7))))
    ends = [0, *cuts.tolist(), batches]
    return [(first, last) for first, last in zip(ends, ends[1:]) if first < last]


def in_pieces(drawn, isa, cuts):
    """What is seen after the same call, cut along the batches; the number of calls."""
    a, built = drawn.built.arguments, drawn.built
    built.restore()
    steps = a["x"].shape[1] if a["x"].ndim == 3 else 1
    page = a["cache_mode"] == "page"
    parts = []
    for first, last in cuts:
        part = dict(a)
        tables = a.get("positions") is not None
        for name in ("x",) if tables else ("x", "cos", "sin"):
            part[name] = a[name][first:last]
        tokens = slice(first * steps, last * steps)
        for name in ("activation_scale", "positions"):
            if a.get(name) is not None:
                part[name] = a[name][tokens]
        part["indices"] = a["indices"][tokens] if page else a["indices"][first:last]
        if not page:
            part |= {name: a[name][first:] for name in ("k_cache", "v_cache")}
        if a["out"] is not None:
            part["out"] = tuple(None if array is None else array[first:last] for array in a["out"])
        parts.append(kvquant.dequant_rope_quant_kvcache(**part, isa=isa)[:3])
    whole = [np.concatenate(arrays) if arrays[0].ndim > 1 else arrays[0] for arrays in zip(*parts)]
    return built.observe((*whole, a["k_cache"], a["v_cache"]))


def check(drawn, counts):
    """None, or what differs; counts what came out."""
    error, expected = outcome(drawn.built, kvquant.reference.dequant_rope_quant_kvcache)
    a = drawn.built.arguments
    if error is not None:
        kind = type(error).__name__
        if drawn.fault is None:
            return f"the reference refuses a good call: {error}"
    else:
        kept = a["indices"].size and a["x"].size and not (a["indices"] == -1).all()
        kind = "rows written" if kept else "nothing to write"
    cuts = pieces(drawn) if error is None else []
    for isa in (*kvquant.isa.available(), None):
        cell = isa or kvquant.isa.active(), "-".join(drawn.case.pair)
        if isa is None and drawn.fault:  # what is remembered of the good call must not help the spoilt one
            kvquant.dequant_rope_quant_kvcache(**drawn.good)
        got_error, got = outcome(drawn.built, kvquant.dequant_rope_quant_kvcache, isa=isa)
        counts[kind] += 1
        counts[cell] += 1
        if type(error) is not type(got_error):
            return f"{isa}: expected {error!r}, got {got_error!r}"
        # A bad value is named with its position.
        if error is not None and "[" in str(error).split(":")[0] and str(error).split(":")[0] != str(got_error).split(":")[0]:
            return f"{isa}: expected {error!r}, got {got_error!r}"
        if difference(expected, got):
            return f"{isa}: {difference(expected, got)}"
        if len(cuts) > 1:
            got = in_pieces(drawn, isa, cuts)
            counts[kind] += len(cuts)
            counts[cell] += len(cuts)
            if difference(expected, got):
                return f"{isa}, batches cut at {cuts}: {difference(expected, got)}"
    return None


def fuzz(seed, first, step, seconds):
    """Cases first, first + step, ... for so many seconds: (counts, cases, failures as (number, text))."""
    counts, failures, number, end = Counter(), [], first, time.monotonic() + seconds
    while time.monotonic() < end and len(failures) < 5:
        drawn = draw(seed, number)
        problem = check(drawn, counts)
        if problem:
            failures.append((number, f"{drawn.case}, fault: {drawn.fault}: {problem}"))
        number += step
    return counts, (number - first) // step, failures


def report(counts, cases, failures, seed, seconds):
    """Prints the histogram; returns whether everything is as it should be."""
    outcomes = {name: count for name, count in counts.items() if isinstance(name, str)}
    cells = {(isa, "-".join(pair)): counts[isa, "-".join(pair)] for isa in kvquant.isa.available() for pair in PAIRS}
    total = sum(outcomes.values()) or 1
    print(f"seed {seed}: {cases} cases, {total} calls in {seconds:.0f} s, {len(failures)} differences")
    for name, count in sorted(outcomes.items(), key=lambda item: -item[1]):
        print(f"  {count / total:6.1%} {name}")
    for isa in kvquant.isa.available():
        print(f"  {isa:12}", *(f"{pair} {count}" for (name, pair), count in cells.items() if name == isa))
    for number, problem in failures:
        print(f"python tests/fuzz.py --seed {seed} --case {number}\n  {problem}")
    errors = sum(count for name, count in outcomes.items() if name.endswith("Error"))
    written = outcomes.get("rows written", 0)
    if written < 0.7 * total or not 0 < errors <= 0.2 * total or min(cells.values()) < total / 4 / len(cells):
        print("the mixture of calls is wrong: too few that write rows, too many errors, or a pair that is hardly met")
        return False
    return not failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", type=int, help="run this one case of the seed")
    given = parser.parse_args()
    if given.case is not None:
        drawn = draw(given.seed, given.case)
        problem = check(drawn, Counter())
        print(drawn.case, f"fault: {drawn.fault}", problem or "no difference", sep="\n")
        return 1 if problem else 0
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        parts = pool.starmap(fuzz, [(given.seed, job, given.jobs, given.seconds) for job in range(given.jobs)])
    counts = sum((part[0] for part in parts), Counter())
    failures = [failure for part in parts for failure in part[2]]
    return 0 if report(counts, sum(part[1] for part in parts), failures, given.seed, given.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())

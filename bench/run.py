"""kvquant from Python against the limit of the machine: python bench/run.py [W1,W2] [options]; bench/README.md has the rest.

One process, bursts of kvquant and of the limit in turn. Every combination is first compared with kvquant.reference, on ordinary
values and on edge values; a differing byte ends in exit code 1.
"""
import argparse
import functools
import json
import os
import sys

import numpy as np

import kvquant
import limit
import timing
import workloads

COLUMNS = ("workload", "state", "threads", "isa", "call", "us", "p10", "p90", "ns_per_token", "gb_per_s", "limit_us", "share",
           "bytes")
CALLS = ("out", "plan", "alloc")  # out= given; a plan, with out=; results allocated by the call


def kvquant_call(w, operands, how, threads, isa=None):
    """A function without arguments that runs kvquant on these operands, as CALLS says."""
    positional, options = workloads.arguments(w, operands)
    options |= {"num_threads": threads, "isa": isa}
    if how == "out":
        return functools.partial(kvquant.dequant_rope_quant_kvcache, *positional, **options, out=workloads.out(w, operands))
    if how == "plan":
        plan = kvquant.plan(*positional, **options, out=workloads.out(w, operands))
        return functools.partial(plan.run, operands["indices"])

    def call():
        q, k, v, _, _ = kvquant.dequant_rope_quant_kvcache(*positional, **options)
        return {"q": q, "k": k, "v": v} if w.kv_output else {"q": q}

    return call


def differing_bytes(w, operands, *how):
    """On ordinary values and on edge values."""
    edge = workloads.edge_operands(w, operands)
    return sum(workloads.differing_bytes(w, kvquant_call(w, o, *how), o) for o in (edge, operands))


def measure(w, state, threads, options):
    """Rows of COLUMNS for one workload, state and number of threads."""
    sets = workloads.operand_sets(w, state)
    limits = limit.bursts(w, sets, threads)
    ours, wrong = {}, {}
    for isa in options.isa:
        for how in options.calls:
            wrong[isa, how] = differing_bytes(w, sets[0], how, threads, isa)
            calls = [kvquant_call(w, operands, how, threads, isa) for operands in sets]
            ours[isa, how] = timing.burst(calls, options.pause / 1e3)
    if w.tokens == 1:  # a yardstick of what any call from Python costs
        a, b, c = np.ones((3, 1), np.float32)
        ours["-", "np.add"] = timing.burst([lambda: np.add(a, b, out=c)])
    samples = {key: [] for key in (*limits, *ours)}
    for _ in range(options.rounds):
        for key, burst in (limits | ours).items():
            samples[key].append(timing.quiet(functools.partial(burst, options.burst), os.getpid(), options.patience))
    fastest = min(timing.summary(samples[kind])["us"] for kind in limits)
    useful = workloads.useful_bytes(w, sets[0])
    for isa, how in ours:
        found = timing.summary(samples[isa, how])
        row = {"workload": w.name, "state": state, "threads": threads, "isa": isa, "call": how, **found}
        if how in CALLS:
            row |= {"ns_per_token": 1e3 * found["us"] / w.tokens, "gb_per_s": useful / found["us"] / 1e3, "limit_us": fastest,
                    "share": fastest / found["us"], "bytes": "equal" if wrong[isa, how] == 0 else f"{wrong[isa, how]} DIFFER"}
        yield row


def text(row):
    values = (row.get(name, "-") for name in COLUMNS)
    return "| " + " | ".join(f"{v:.3g}" if isinstance(v, float) and v < 1000 else f"{v:.0f}" if isinstance(v, float) else str(v)
                             for v in values) + " |"


def main(argv=None):
    available = kvquant.isa.available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="?", help="names in workloads.toml, comma separated (all)")
    parser.add_argument("--state", default=",".join(workloads.STATES), help="%(default)s")
    parser.add_argument("--threads", default="1", help="comma separated (%(default)s)")
    parser.add_argument("--isa", default=kvquant.isa.active(), help="comma separated, or all (%(default)s)")
    parser.add_argument("--calls", default="out", help=f"comma separated, of {', '.join(CALLS)} (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s")
    parser.add_argument("--burst", type=float, default=0.12, help="seconds (%(default)s)")
    parser.add_argument("--pause", type=float, default=0, help="ms without work before each of kvquant's calls (%(default)s)")
    parser.add_argument("--patience", type=float, default=10, help="seconds to wait for idle CPUs, per burst (%(default)s)")
    parser.add_argument("--json", help="append each row to this file, one JSON object a line")
    parser.add_argument("--smoke", action="store_true", help="W4, every state and call, one short burst: does the bench work?")
    options = parser.parse_args(argv)
    if options.smoke:
        options.workloads, options.calls, options.rounds, options.burst, options.patience = "W4", ",".join(CALLS), 1, 0.002, 0
    options.isa = available if options.isa == "all" else options.isa.split(",")
    options.calls = options.calls.split(",")
    bad = [f"--{name}: {value}" for name, values, known in (
        ("isa", options.isa, available), ("calls", options.calls, CALLS), ("state", options.state.split(","), workloads.STATES))
        for value in values if value not in known]
    if bad:
        parser.error("; ".join(bad))
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    equal = True
    for w in workloads.load(options.workloads):
        for state in (s for s in workloads.states(w) if s in options.state.split(",")):
            for threads in map(int, options.threads.split(",")):
                affinity = os.sched_getaffinity(0)
                timing.pin(threads)
                for row in measure(w, state, threads, options):
                    print(text(row), flush=True)
                    equal &= row.get("bytes", "equal") == "equal"
                    if options.json:
                        with open(options.json, "a") as file:
                            print(json.dumps(row), file=file)
                os.sched_setaffinity(0, affinity)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

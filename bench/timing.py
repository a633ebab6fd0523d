"""Bursts of timed calls, quiet moments to take them in, and what is reported of them. Knows no workload."""
import itertools
import os
import statistics
import time

_TICKS = os.sysconf("SC_CLK_TCK")


def burst(calls, pause=0.0):
    """A function(seconds) -> list of µs, one per call; goes through `calls` in turn, on from where it stopped, and sleeps
    `pause` seconds before each, as an engine does other work."""
    turn = itertools.cycle(calls)

    def run(seconds):
        clock, samples = time.perf_counter, []
        next(turn)()
        end = clock() + seconds
        while True:
            call = next(turn)
            if pause:
                time.sleep(pause)
            start = clock()
            call()
            stop = clock()
            samples.append(1e6 * (stop - start))
            if stop > end and len(samples) >= 3:
                return samples

    return run


def pin(threads):
    """One thread: onto one CPU, the last that we may use. More: as the system likes, within those that we may use."""
    if threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def summary(bursts):
    """The median of the bursts' medians (a disturbed burst counts once), and p10 and p90 of all samples; µs."""
    samples = sorted(itertools.chain.from_iterable(bursts))
    return {"us": statistics.median(statistics.median(b) for b in bursts), "p10": samples[len(samples) // 10],
            "p90": samples[len(samples) * 9 // 10], "samples": len(samples)}


def quiet(measure, pid, patience):
    """measure() between two looks at the CPUs that we may use: begun when they are idle, repeated if a process other
    than `pid` ran on them meanwhile. After `patience` seconds the next result is taken as it is."""
    end = time.monotonic() + patience
    while True:
        while time.monotonic() < end:
            before = _busy()
            time.sleep(0.1)
            if _busy() - before <= 0.03:
                break
        before, own, start = _busy(), _used(pid), time.monotonic()
        result = measure()
        others = (_busy() - before) - (_used(pid) - own)
        if others < 0.15 * (time.monotonic() - start) + 0.02 or time.monotonic() >= end:
            return result


def _busy():
    """Seconds that the CPUs we may use have worked."""
    wanted = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    with open("/proc/stat") as file:
        lines = [line.split() for line in file if line.split()[0] in wanted]
    return sum(sum(map(int, line[1:9])) - int(line[4]) - int(line[5]) for line in lines) / _TICKS


def _used(pid):
    """Seconds that a process has worked."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

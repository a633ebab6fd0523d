"""Threads (docs/threads.md): same bytes from any number of them, and a pool that survives fork, sleeps when idle and never
stands in the way. What needs a fresh process or a fork runs as a program of its own."""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from pathlib import Path

import kvquant
import numpy as np
import pytest
from calls import rows, tokens_of_codes
from cases import Case, build, difference
from test_numbers import FloatState

COUNTS = (1, 2, 3, 8, 32)
# 257 tokens are 65 blocks of four, so that 32 threads get some each; more than 2 * 65536 elements, so that the automatic count
# is two where there are two CPUs.
CASE = Case(tokens=257, dim=34, rank=2, heads=(8, 4), cache_mode="page", offsets="both", kv_output=True, data="special")


def in_threads(count, work):
    """work(i) on `count` threads; the first exception is raised here."""
    failures = []

    def guarded(i):
        try:
            work(i)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


PRELUDE = f"""
import os, signal, sys, threading, time, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import kvquant
from cases import Case, build, difference
from kvquant import _core

class Work:
    def __init__(self, seed=0):
        self.built = build(Case(tokens=257, dim=34, rank=2, heads=(8, 4), cache_mode="page", kv_output=True, seed=seed))
        self.expected = self.built.run(kvquant.reference.dequant_rope_quant_kvcache)

    def right(self, num_threads=4):
        got = self.built.run(kvquant.dequant_rope_quant_kvcache, num_threads=num_threads)
        return difference(self.expected, got) is None

def in_child(check):
    "check() in a forked child, which has ten seconds."
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(10)
            check()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"child ended with status {{status}}"

def starts_anew():
    assert _core.pool_workers() == 0 and work.right() and _core.pool_workers() == 3

def tasks():
    "The status lines of the pool's threads in this process."
    found = []
    for task in os.listdir("/proc/self/task"):
        lines = open(f"/proc/self/task/{{task}}/status").read().splitlines()
        status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
        if status["Name"] == "kvquant":
            found.append(status)
    return found

work = Work()
"""


def run_program(text, tmp_path, **environment):
    """Run PRELUDE and `text` in a fresh interpreter; it has to reach its end. Returns what it printed."""
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(text) + "\nprint('reached the end')\n")
    settings = {name: value for name, value in os.environ.items() if name != "KVQUANT_NUM_THREADS"} | environment
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=settings)
    assert done.returncode == 0 and done.stdout.endswith("reached the end\n"), done.stdout + done.stderr
    return done.stdout


# Same bytes ----------------------------------------------------------------------------------------------------------


def test_same_bytes_for_any_number_of_threads(pair, isa, executed):
    for case in (CASE, Case(tokens=64, dim=6, duplicates=True, padding=True, cache_mode="page", out="fused")):
        built = build(Case(**{**vars(case), "pair": pair}))
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        for num_threads in (*COUNTS, None):
            got = built.run(kvquant.dequant_rope_quant_kvcache, isa=isa, num_threads=num_threads)
            assert difference(expected, got) is None, num_threads
    executed("C8", isa, pair)


def test_threads_on_disjoint_rows(isa):
    """16 callers write their own tokens of one cache, each with two threads of its own or, the pool being taken, with one."""
    built = build(Case(tokens=256, dim=34, rank=2, cache_mode="page", bias="float32", activation_scale=True))
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    per_token = ("x", "cos", "sin", "indices", "activation_scale")
    for _ in range(5):
        built.restore()
        q = [None] * 16

        def work(i, q=q):
            own = {name: built.arguments[name][16 * i : 16 * i + 16] for name in per_token}
            q[i] = kvquant.dequant_rope_quant_kvcache(**{**built.arguments, **own, "isa": isa, "num_threads": 2})[0]

        in_threads(16, work)
        a = built.arguments
        none = np.empty(0, q[0].dtype)
        got = built.observe((np.concatenate(q), none, none, a["k_cache"], a["v_cache"]))
        assert difference(expected, got) is None


def test_two_threads_share_a_plan(isa):
    built = build(CASE)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    built.restore()
    start = built.arguments["k_cache"].copy(), built.arguments["v_cache"].copy()
    plan = kvquant.plan(**{**built.arguments, "isa": isa, "num_threads": 3})

    def work(i):
        for _ in range(20):
            k_cache, v_cache = (cache.copy() for cache in start)
            got = plan.run(k_cache=k_cache, v_cache=v_cache)
            assert [array.tobytes() for array in got[:3]] == [expected[name][2] for name in ("q", "k", "v")]
            for cache in (k_cache, v_cache):
                name = "k_cache" if cache is k_cache else "v_cache"
                assert expected[f"buffer of {name}"].startswith(cache.tobytes())

    in_threads(2, work)


def test_last_duplicate_wins_in_every_run(isa):
    """F11: 4096 tokens for one row."""
    codes = np.arange(4096) % 100
    arguments = tokens_of_codes(
        ("float32", "float32"), codes, (2, 2, 1, 2), np.full(4096, 3), cache_mode="page", allow_duplicates=True
    )
    plan = kvquant.plan(**arguments, isa=isa)
    for num_threads in (1, 2, 8):
        for _ in range(1000 // len(kvquant.isa.available())):
            arguments["k_cache"][...] = arguments["v_cache"][...] = 77
            plan.run(num_threads=num_threads)
            assert rows(arguments["k_cache"]) == [[77, 77], [77, 95]]
            assert rows(arguments["v_cache"]) == [[77, 77], [77, -95]]


# Errors, and callers that do not behave ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [64, 4096])
def test_bad_index_in_the_last_row_changes_nothing(tokens, isa):
    """F13, F60: the error comes out as an exception of the caller, before a byte is written; the next call works."""
    arguments = tokens_of_codes(
        ("int32", "float16"), np.arange(tokens) % 100, (tokens, 1, 1, 2), np.arange(tokens), cache_mode="page"
    )
    arguments["indices"][-1] = tokens
    arguments["out"] = (np.full((tokens, 1, 2), 9, np.float16), None, None)
    written = arguments["k_cache"], arguments["v_cache"], arguments["out"][0]
    before = [array.tobytes() for array in written]
    with pytest.raises(IndexError, match=rf"indices\[{tokens - 1}\].*{tokens}"):
        kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=8)
    assert before == [array.tobytes() for array in written]
    arguments["indices"][-1] = tokens - 1
    kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=8)
    assert rows(arguments["k_cache"])[-1] == [(tokens - 1) % 100]


def test_another_thread_scribbles_on_indices(isa):
    """Every index is read once and checked: a call writes rows of its cache or raises, whatever the indices turn into."""
    tokens, margin = 512, 1 << 20
    arguments = tokens_of_codes(
        ("float16", "float16"), np.arange(tokens) % 100, (64, 16, 1, 8), np.arange(tokens), cache_mode="page"
    )
    size = 64 * 16 * 8
    memory = np.full((2, margin + size + margin), 55, np.int8)
    for name, buffer in zip(("k_cache", "v_cache"), memory):
        arguments[name] = buffer[margin : margin + size].reshape(64, 16, 1, 8)
    indices = arguments["indices"]
    wild = indices.copy()
    wild[::7] = np.resize([-1, 1024, 1030, -70000, 2**31, -(2**63), 2**62, 90000], wild[::7].size)
    patterns = [indices.copy(), indices[::-1].copy(), wild, indices.copy(), np.roll(indices, 5)]
    stop = threading.Event()
    memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def scribble():
        while not stop.is_set():
            for pattern in patterns:
                memmove(indices.ctypes.data, pattern.ctypes.data, indices.nbytes)

    thread = threading.Thread(target=scribble)
    thread.start()
    outcomes = {"written": 0, "refused": 0}
    try:
        for i in range(20000):
            if i >= 150 and min(outcomes.values()) > 0:  # with one CPU the threads take turns of many calls
                break
            memory[:, margin:-margin] = 55
            try:
                kvquant.dequant_rope_quant_kvcache(
                    **arguments, isa=isa, num_threads=(1, 2, 8)[i % 3], allow_duplicates=i % 2 == 0
                )
                outcomes["written"] += 1
            except (IndexError, ValueError) as refusal:
                assert str(refusal).startswith("indices[")
                assert (memory == 55).all()
                outcomes["refused"] += 1
            assert (memory[:, :margin] == 55).all() and (memory[:, -margin:] == 55).all()
    finally:
        stop.set()
        thread.join()
    assert min(outcomes.values()) > 0, outcomes


# Floating-point state ------------------------------------------------------------------------------------------------


def subnormal_rows():
    """F57: 1e-40 / 1e-40 in every element: 1, or 0 where a thread flushes subnormals."""
    tokens, dim = 64, 16
    lead = np.ones((tokens, dim), np.float32)
    return dict(
        x=np.full((tokens, 3 * dim), 1e-40, np.float32),
        cos=lead,
        sin=0 * lead,
        k_cache=np.zeros((tokens, 1, 1, dim), np.int8),
        v_cache=np.zeros((tokens, 1, 1, dim), np.int8),
        indices=np.arange(tokens),
        scale_k=np.full(1, 1e-40, np.float32),
        scale_v=np.full(1, 1e-40, np.float32),
        size_splits=[dim] * 3,
        cache_mode="page",
    )


def check_subnormals_under_flush(isa, arguments):
    """Every K and V of the arguments is the code 1, whatever the caller's state, which is given back."""
    state = FloatState()
    for flush in (0, 3, 0):
        for num_threads in (1, 8):
            arguments["k_cache"][...] = arguments["v_cache"][...] = 77
            before = state.set(0, flush, False)
            try:
                kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=num_threads)
                after = state.read()
            finally:
                state.restore()
            assert after == before
            assert (arguments["k_cache"] == 1).all() and (arguments["v_cache"] == 1).all(), (flush, num_threads)


def test_floating_point_state_of_workers(isa):
    """The pool's threads are older than the caller's flush-to-zero."""
    kvquant.dequant_rope_quant_kvcache(**subnormal_rows(), isa=isa, num_threads=8)
    check_subnormals_under_flush(isa, subnormal_rows())


def test_floating_point_state_of_workers_born_under_flush_to_zero(tmp_path):
    """The pool's threads inherit the caller's flush-to-zero."""
    program = """
    from test_threads import FloatState, check_subnormals_under_flush, subnormal_rows
    def check():
        state = FloatState()
        arguments = subnormal_rows()
        state.set(0, 3, False)
        kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=8)
        state.restore()
        assert (arguments["k_cache"] == 1).all() and _core.pool_workers() == 7
        check_subnormals_under_flush(isa, subnormal_rows())
    for isa in kvquant.isa.available():
        in_child(check)
    """
    run_program(program, tmp_path)


# fork, spawn, forkserver ---------------------------------------------------------------------------------------------

FORKS = {
    "before_use": "",
    "after_use": "assert work.right() and _core.pool_workers() == 3",
    "during_calls": """
        def call_on():
            plan = kvquant.plan(**Work(1).built.arguments)
            while not stop:
                plan.run(num_threads=4)
        stop = False
        callers = [threading.Thread(target=call_on) for _ in range(2)]
        for caller in callers:
            caller.start()
        while _core.pool_workers() < 3:
            time.sleep(0.001)
    """,
}


@pytest.mark.parametrize("when", FORKS)
def test_fork(when, tmp_path):
    program = f"""
for _ in range(20):
    in_child(starts_anew)
stop = True
starts_anew() if {when == "before_use"} else work.right() or sys.exit("the parent's call is wrong")
"""
    run_program(textwrap.dedent(FORKS[when]) + program, tmp_path)


@pytest.mark.parametrize("used", [False, True])
def test_fork_while_every_lock_is_held(used, tmp_path):
    """The child neither waits for a lock whose holder it does not have, nor touches it."""
    program = f"""
    if {used}:
        assert work.right()
    for _ in range(20):
        holder = threading.Thread(target=_core.pool_hold_locks, args=(100,))
        holder.start()
        time.sleep(0.01)
        start = time.monotonic()
        in_child(starts_anew)
        holder.join()
    assert work.right() and _core.pool_workers() == 3
    """
    run_program(program, tmp_path)


def test_grandchildren(tmp_path):
    program = """
    def check():
        starts_anew()
        in_child(starts_anew)
        assert work.right()
    assert work.right()
    in_child(check)
    """
    run_program(program, tmp_path)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method, tmp_path):
    program = f"""
    if __name__ == "__main__":
        import multiprocessing
        assert work.right()
        context = multiprocessing.get_context({method!r})
        children = [context.Process(target=starts_anew) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0
    """
    run_program(program, tmp_path)


# Threads that can't be had -------------------------------------------------------------------------------------------


def test_no_thread_can_be_started(tmp_path):
    program = """
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != 64 << 20:  # the size of a thread's stack is read when the program starts
        resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, hard))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    _core.pool_refuse_starts(True)
    assert work.right(8) and _core.pool_workers() == 0
    _core.pool_refuse_starts(False)

    def without_memory_for_stacks():
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (48 << 20),) * 2)
        assert work.right(8) and _core.pool_workers() == 0
    in_child(without_memory_for_stacks)

    assert work.right(3) and _core.pool_workers() == 2
    _core.pool_refuse_starts(True)
    assert work.right(8) and _core.pool_workers() == 2  # those that there are
    _core.pool_refuse_starts(False)
    assert work.right(8) and _core.pool_workers() == 7
    """
    run_program(program, tmp_path)


def test_environment_variable(tmp_path):
    program = """
    def workers_under(value, num_threads):
        def check():
            if value is not None:
                os.environ["KVQUANT_NUM_THREADS"] = value
            assert work.right(num_threads)
            assert _core.pool_workers() == expected, (value, num_threads, _core.pool_workers())
        in_child(check)

    cpus = len(os.sched_getaffinity(0))
    automatic = min(cpus, 257 * 16 * 34 // 65536) - 1
    for value, num_threads, expected in (
        (None, 8, 7), ("", 8, 7), ("3", 8, 2), ("1", 8, 0), ("1", None, 0), ("1", 1, 0), ("007", 8, 6),
        (None, None, automatic), ("", None, automatic), ("99999999999999999999", 8, 7), ("99999999999999999999", 1000, 64),
    ):
        workers_under(value, num_threads)

    def refusals():
        for value in ("0", "-1", "two", "1.5", " 2", "2 ", "0x2", "+2", "1e1", "00"):
            os.environ["KVQUANT_NUM_THREADS"] = value
            arguments = work.built.arguments
            for call in (
                lambda: kvquant.dequant_rope_quant_kvcache(**arguments),
                lambda: kvquant.dequant_rope_quant_kvcache(**{**arguments, "num_threads": 2}),
                lambda: kvquant.plan(**arguments),
            ):
                work.built.restore()
                before = {name: buffer.tobytes() for name, buffer in work.built.buffers.items()}
                try:
                    call()
                except ValueError as error:
                    assert str(error).startswith("KVQUANT_NUM_THREADS: ") and repr(value) in str(error), error
                else:
                    sys.exit(f"no error for {value!r}")
                assert before == {name: buffer.tobytes() for name, buffer in work.built.buffers.items()}
            assert work.right(1)  # does not ask
        os.environ["KVQUANT_NUM_THREADS"] = "2"
        assert work.right(8) and _core.pool_workers() == 1
        os.environ["KVQUANT_NUM_THREADS"] = "0"
        assert work.right(8)  # a good value holds for the process
    in_child(refusals)
    """
    run_program(program, tmp_path)
    run_program("assert work.right(8) and _core.pool_workers() == 1", tmp_path, KVQUANT_NUM_THREADS="2")


def test_affinity(tmp_path):
    """Automatic counts keep within the caller's CPUs, and workers run only where the caller may."""
    program = """
    cpus = os.sched_getaffinity(0)

    def on_one_cpu():
        os.sched_setaffinity(0, {max(cpus)})
        assert work.right(None) and _core.pool_workers() == 0
        assert work.right(4) and _core.pool_workers() == 3
        for cpu in sorted(cpus):
            os.sched_setaffinity(0, {cpu})
            for _ in range(200):  # a worker follows when it takes part
                assert work.right(4)
                if {status["Cpus_allowed"] for status in tasks()} == {own()}:
                    break
                time.sleep(0.002)
            else:
                sys.exit("workers stay where an earlier call was")
    def own():
        return [line.split()[1] for line in open("/proc/thread-self/status") if line.startswith("Cpus_allowed:")][0]
    in_child(on_one_cpu)
    """
    run_program(program, tmp_path)


def test_no_threads_for_small_work(tmp_path):
    program = """
    small = build(Case(tokens=64, dim=16, rank=2))
    small.run(kvquant.dequant_rope_quant_kvcache, num_threads=None)
    one = build(Case(tokens=1, dim=16, rank=2))
    one.run(kvquant.dequant_rope_quant_kvcache, num_threads=8)
    assert _core.pool_workers() == 0
    """
    run_program(program, tmp_path)


def test_short_calls_with_pauses_wake_nobody(tmp_path):
    """They would be over before a sleeping worker comes; those that follow each other closely, and long ones, are shared."""
    program = """
    def workers_after(calls, pause, shape):
        def check():
            _core.pool_always_wake(False)
            x = np.ones((shape[0], 3 * shape[1]), np.float32)
            table, scale = np.ones((shape[0], shape[1]), np.float32), np.ones(1, np.float32)
            k_cache, v_cache = (np.zeros((shape[0], 1, 1, shape[1]), np.int8) for _ in range(2))
            for _ in range(calls):
                if pause:
                    time.sleep(pause)
                kvquant.dequant_rope_quant_kvcache(
                    x, table, table, k_cache, v_cache, np.arange(shape[0]), scale, scale, [shape[1]] * 3, cache_mode="page",
                    num_threads=2)
            print(_core.pool_workers(), end=" ", flush=True)
        in_child(check)
    workers_after(5, 0.002, (1000, 256))  # 0.77 M elements
    workers_after(200, 0, (200, 64))
    workers_after(2, 0.002, (1400, 256))  # 1.08 M
    """
    assert run_program("import numpy as np\n" + textwrap.dedent(program), tmp_path).startswith("0 1 1 ")


# Manners -------------------------------------------------------------------------------------------------------------


def test_idle_workers_sleep():
    built = build(CASE)
    for _ in range(3):
        built.run(kvquant.dequant_rope_quant_kvcache, num_threads=8)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_workers_leave_signals_to_the_program(tmp_path):
    """All but the signals of a thread's own faults, which have to reach the handler that reports them."""
    program = """
    assert work.right(4)
    own_faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS}
    open_to_all = own_faults | {signal.SIGKILL, signal.SIGSTOP}
    while len(found := tasks()) < 3:  # a thread names itself when it first runs
        time.sleep(0.001)
    assert len(found) == 3
    for status in found:
        blocked = int(status["SigBlk"], 16)
        for number in set(signal.Signals) - open_to_all:
            assert blocked >> (number - 1) & 1, number
        for number in own_faults:
            assert not blocked >> (number - 1) & 1, number
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])  # the caller's mask is as it was
    """
    run_program(program, tmp_path)


def test_the_process_ends_while_workers_work(tmp_path):
    program = """
    def call_on():
        while True:
            work.right(4)
    for _ in range(2):
        threading.Thread(target=call_on, daemon=True).start()
    while _core.pool_workers() < 3:
        time.sleep(0.001)
    time.sleep(0.05)
    """
    for _ in range(3):
        run_program(program, tmp_path)


def free_threaded_python():
    """A free-threaded Python that has kvquant, or None."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return sys.executable
    for name in ("python3.15t", "python3.14t", "python3.13t"):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", "import kvquant"], capture_output=True, timeout=60).returncode == 0:
            return path
    return None


def test_free_threaded_python(tmp_path):
    """F62: importing kvquant leaves the GIL off, without a warning; eight threads race for the first call."""
    python = free_threaded_python()
    if python is None:
        pytest.skip("no free-threaded Python (python3.13t or later) with kvquant here: nothing checks that the GIL stays off")
    program = tmp_path / "program.py"
    race = """
import sys, threading
import numpy as np
import kvquant
assert not sys._is_gil_enabled()
gate, failures = threading.Barrier(8), []
def work():
    ones = np.ones((256, 64), np.float32)
    k, v = np.zeros((2, 256, 1, 1, 64), np.int8)
    gate.wait()
    for _ in range(50):
        kvquant.dequant_rope_quant_kvcache(np.ones((256, 192), np.float32), ones, 0 * ones, k, v, np.arange(256),
                                           np.ones(1, np.float32), np.ones(1, np.float32), [64] * 3, cache_mode="page",
                                           num_threads=2)
    if not (k == 1).all() or not (v == 1).all():
        failures.append(1)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(len(failures))
"""
    program.write_text(race)
    done = subprocess.run([python, "-W", "error", str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

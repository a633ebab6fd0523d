"""I4 when memory runs out: every allocation that a call makes, Python's own included, is refused once, one call after another.
Each such call raises MemoryError and has written nothing, or does without and gives the right bytes; the next call works."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_threads import PRELUDE

HERE = Path(__file__).parent
PROGRAM = """
import ctypes
from functools import partial
libc = ctypes.CDLL(None)
libc.watch_this_thread()
granted, to_refuse, refused = (ctypes.c_long.in_dll(libc, name) for name in ("granted", "to_refuse", "refused"))

def starved(call, first, count):
    \"\"\"call() with allocations first .. first + count - 1 refused: its result, its exception, and how many were refused.

    `call` is a partial object and this frame exists for good: where CPython 3.11 gets no memory for a frame while an exception
    passes through it, it answers with SystemError.
    \"\"\"
    frame, result, failure = sys._getframe(), None, None
    to_refuse.value, refused.value = count, 0
    try:
        granted.value = first
        result = call()
        granted.value = -1
    except BaseException as error:
        granted.value = -1
        failure = error
    return result, failure, refused.value

def outcomes(call, check, count):
    "call() with each allocation refused in turn: its errors, how often it did without the memory, and the allocations."
    errors, survived, first = set(), 0, 0
    while True:
        result, failure, times = starved(call, first, count)
        check(result, failure)
        errors.add((type(failure).__name__, str(failure)))
        if not times:
            return errors, survived, first
        survived += failure is None
        first += 1

class Check:
    "A call, and what has to hold after it: everything as before, or the right bytes; and the next call works."

    def __init__(self, case, may_raise=(MemoryError,), **more):
        self.built = build(case)
        self.expected = self.built.run(kvquant.reference.dequant_rope_quant_kvcache)
        self.may_raise, self.more = may_raise, more
        self.arguments = self.built.arguments | more
        self.built.restore()
        self.function = partial(kvquant.dequant_rope_quant_kvcache, **self.arguments)
        self.plan = partial(kvquant.plan, **self.arguments)
        self.run_plan = self.plan().run

    def __call__(self, result, failure):
        assert failure is None or isinstance(failure, self.may_raise), repr(failure)
        if isinstance(result, tuple):
            assert difference(self.expected, self.built.observe(result)) is None
        else:
            for name, buffer in self.built.buffers.items():
                assert buffer.tobytes() == self.built.before[name].tobytes(), name
        again = self.built.run(kvquant.dequant_rope_quant_kvcache, **self.more)
        assert difference(self.expected, again) is None
        self.built.restore()
"""


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    library = tmp_path_factory.mktemp("preload") / "failing_malloc.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "failing_malloc.c"], check=True)
    return library


def run_program(text, preload, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + PROGRAM + textwrap.dedent(text) + "\nprint('reached the end')\n")
    environment = os.environ | {"LD_PRELOAD": str(preload), "PYTHONMALLOC": "malloc"}
    environment.pop("KVQUANT_NUM_THREADS", None)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stdout.endswith("reached the end\n"), done.stdout + done.stderr


def test_every_allocation_of_a_call(preload, isa, tmp_path):
    """Outputs, the workspace where it is larger than what each thread keeps, and what Python allocates on the way."""
    program = f"""
    for tokens, kv_output, out in ((3, True, None), (2000, True, None), (2000, False, "some"), (2000, True, "contiguous")):
        check = Check(Case(tokens=tokens, dim=6, rank=2, cache_mode="page", kv_output=kv_output, out=out, offsets="both"),
                      isa={isa!r}, num_threads=1)
        for call in (check.function, check.run_plan, check.plan):
            for count in (1, 3):
                errors, survived, allocations = outcomes(call, check, count)
                assert allocations > 0 and survived == 0
                if call is not check.plan and count == 1:  # with several refused, the message may be one of them
                    assert any("workspace" in text for name, text in errors) == (tokens == 2000), errors
    """
    run_program(program, preload, tmp_path)


def test_every_allocation_of_a_refused_call(preload, isa, tmp_path):
    program = f"""
    check = Check(Case(tokens=2000, dim=6, rank=2, cache_mode="page", kv_output=True), (MemoryError, IndexError),
                  isa={isa!r}, num_threads=1)
    bad = check.arguments["indices"].copy()
    bad[-1] = -5
    call = partial(kvquant.dequant_rope_quant_kvcache, **check.arguments | {{"indices": bad}})
    for count in (1, 3):
        errors, survived, allocations = outcomes(call, check, count)
        assert allocations > 0 and survived == 0
        assert {{"IndexError", "MemoryError"}} <= {{name for name, text in errors}}, errors
    """
    run_program(program, preload, tmp_path)


def test_every_allocation_of_the_first_call_on_several_threads(preload, tmp_path):
    """The pool is made in such a call. It is in the way of nothing: without memory for it the caller works alone."""
    program = """
    check = Check(Case(tokens=2000, dim=6, rank=2, cache_mode="page", kv_output=True), num_threads=4)

    def in_new_process(first):
        "0: no allocation was refused; 10: one was, and the call did without; 11: MemoryError."
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(20)
                result, failure, times = starved(check.function, first, 1)
                check(result, failure)
                os._exit(0 if not times else 10 if failure is None else 11)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    seen = []
    while not seen or seen[-1] in (10, 11):
        seen.append(in_new_process(len(seen)))
        assert len(seen) < 500
    assert seen[-1] == 0 and {10, 11} <= set(seen), seen
    """
    run_program(program, preload, tmp_path)

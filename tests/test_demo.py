"""The demo and its sample: the shipped file is the one described, and the demo notices a single wrong byte."""

import hashlib
import subprocess
import sys

import kvquant
import kvquant.reference
import numpy as np
import pytest
from kvquant import demo

kSha256 = "a3c9d621c98c16951d95913a3ba6dbb1313a053d69e585e259da1aca0a8e2ddd"
kTokens, kHeads, kKvHeads, kDim = 64, 9, 3, 64
kWidth = (kHeads + 2 * kKvHeads) * kDim
kLayers = [0, 15]


@pytest.fixture(scope="module")
def sample():
    return demo.load_sample()


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(demo, "kTimedSeconds", 0.0)


def relative_rms(got, expected):
    return demo.error(got, expected)[2]


def test_sample_is_the_described_file():
    content = demo.kSample.read_bytes()
    assert hashlib.sha256(content).hexdigest() == kSha256
    assert len(content) <= 600_000
    readme = demo.kSample.with_name("README.md").read_text(encoding="utf-8")
    assert kSha256 in readme and f"{len(content)} bytes" in readme


def test_shared_arrays(sample):
    shared, layers = sample
    assert list(layers) == kLayers
    assert shared["token_ids"].shape == (kTokens,) and shared["token_ids"].dtype == np.int32
    assert 0 <= shared["token_ids"].min() and shared["token_ids"].max() < 49152
    angle = np.arange(kTokens)[:, None] * 100000.0 ** (-np.arange(0, kDim, 2) / kDim)
    for name, function in (("cos", np.cos), ("sin", np.sin)):
        assert shared[name].shape == (kTokens, kDim) and shared[name].dtype == np.float16
        assert np.abs(shared[name] - np.tile(function(angle), 2)).max() <= 2.0**-11  # half an ulp of float16 below 1


@pytest.mark.parametrize("number", kLayers)
def test_layer_arrays(sample, number):
    layer = sample[1][number]
    shapes = {
        "x": (kTokens, kWidth), "weight_scale": (kWidth,), "activation_scale": (kTokens,),
        "scale_k": (kKvHeads, kDim), "scale_v": (kKvHeads, kDim),
        "float_q": (kTokens, kHeads, kDim), "float_k": (kTokens, kKvHeads, kDim), "float_v": (kTokens, kKvHeads, kDim),
    }  # fmt: skip
    assert {name: array.shape for name, array in layer.items()} == shapes
    for name, array in layer.items():
        dtype = np.int32 if name == "x" else np.float16 if name.startswith("float_") else np.float32
        assert array.dtype == dtype, name
        assert np.isfinite(array).all(), name
        if "scale" in name:
            assert (array > 0).all() and (array < 1).all(), name
    # 576 products of two int8 codes; real accumulators stay far below the bound and are not all small.
    assert 10_000 < np.abs(layer["x"]).max() <= 576 * 127 * 127


@pytest.mark.parametrize("number", kLayers)
def test_accumulators_fit_the_float_model(sample, number):
    """Rotation leaves v alone and keeps the length of a pair, so x can be compared without the operator."""
    layer = sample[1][number]
    f = layer["x"] * layer["weight_scale"].astype(np.float64) * layer["activation_scale"][:, None]
    q, k, v = np.split(f.reshape(kTokens, -1, kDim), [kHeads, kHeads + kKvHeads], axis=1)

    def pair_length(a):
        return np.hypot(*np.split(a.astype(np.float64), 2, axis=-1))

    assert relative_rms(pair_length(q), pair_length(layer["float_q"])) < 0.05
    assert relative_rms(pair_length(k), pair_length(layer["float_k"])) < 0.05
    assert relative_rms(v, layer["float_v"]) < 0.10  # W8A8 without outlier smoothing: 3.5 % and 8.8 %


def test_differing_bytes():
    a = np.arange(6, dtype=np.float16).reshape(2, 3)
    b = a.copy()
    assert demo.differing_bytes([a], [b]) == 0
    b.view(np.uint8)[1, 2] ^= 1
    assert demo.differing_bytes([a, a], [a, b]) == 1
    assert demo.differing_bytes([np.float16([0.0])], [np.float16([-0.0])]) == 1
    nan = np.array([0x7E00, 0x7E01], np.uint16).view(np.float16)
    assert demo.differing_bytes([nan], [nan.copy()]) == 0
    assert demo.differing_bytes([nan], [nan[::-1]]) == 2
    assert demo.differing_bytes([a], [a.astype(np.float32)]) > 0
    assert demo.differing_bytes([a], [a.reshape(3, 2)]) > 0


def test_demo(capsys, fast):
    assert demo.main(["--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("bytes equal") == 2 * len(kLayers)
    assert kvquant.isa.active() in printed


def test_demo_under_each_isa(capsys, fast, isa):
    assert demo.main(["--isa", isa]) == 0
    assert f"ISA {isa}," in capsys.readouterr().out


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("tokens", [demo.kPrefill, 1], ids=["prefill", "decode"])
def test_planted_difference(monkeypatch, capsys, fast, which, tokens):
    """One bit of one output or cache, in the calls of one group: exit code 1, and the group that is named."""
    right = kvquant.reference.dequant_rope_quant_kvcache

    def wrong(x, *operands, **options):
        outputs = right(x, *operands, **options)
        if x.size == tokens * kWidth:
            outputs[which].reshape(-1).view(np.uint8)[-1] ^= 1
        return outputs

    monkeypatch.setattr(kvquant.reference, "dequant_rope_quant_kvcache", wrong)
    assert demo.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    group = "prefill" if tokens > 1 else "decode"
    assert all("BYTES DIFFER" in line for line in lines if line.strip().startswith(group))
    assert lines[-1].startswith("FAILED")


@pytest.mark.parametrize(
    "arguments", [["--threads", "0"], ["--threads", "x"], ["--isa", "none"], ["--what"]], ids=" ".join
)
def test_wrong_command_line(capsys, arguments):
    assert demo.main(arguments) == 2
    assert arguments[0] in capsys.readouterr().err


def test_command(tmp_path):
    """As a user types it, from a directory that is not the source tree."""
    done = subprocess.run([sys.executable, "-m", "kvquant", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes equal") == 2 * len(kLayers)
    assert done.stderr == ""

"""The fuzzer itself: a short run finds nothing and holds the right mixture; a planted bug is found, and found again by its seed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import fuzz
import kvquant
import numpy as np
import pytest


def test_a_short_run(capsys):
    counts, cases, failures = fuzz.fuzz(seed=0, first=0, step=1, seconds=3)
    assert fuzz.report(counts, cases, failures, 0, 3), capsys.readouterr().out


def wrong_tail(result):  # the last column of odd blocks of K
    dim = result[3].shape[-1]
    if dim % 16 and result[3].size:
        result[3][..., -1] ^= 1


def wrong_nan(result):
    q = result[0].view(f"u{result[0].itemsize}")
    if np.isnan(result[0].astype(np.float32)).any():
        q |= np.where(np.isnan(result[0].astype(np.float32)), 1 << (8 * q.itemsize - 1), 0).astype(q.dtype)


def wrong_tie(result):  # one V code in a call is one too high
    if result[4].size and result[4].flat[0] == 7:
        result[4][(0,) * 4] += 1


@pytest.mark.parametrize("bug", [wrong_tail, wrong_nan, wrong_tie])
def test_a_planted_bug_is_found_and_its_seed_finds_it_again(bug, monkeypatch):
    right = kvquant.dequant_rope_quant_kvcache

    def wrong(**arguments):
        result = right(**arguments)
        if arguments.get("isa") == "scalar":
            bug(result)
        return result

    monkeypatch.setattr(kvquant, "dequant_rope_quant_kvcache", wrong)
    _, _, failures = fuzz.fuzz(seed=5, first=0, step=1, seconds=20)
    assert failures and all("scalar" in problem for _, problem in failures)
    number = failures[0][0]
    assert fuzz.check(fuzz.draw(5, number), Counter())
    monkeypatch.undo()
    assert fuzz.check(fuzz.draw(5, number), Counter()) is None


def test_a_missing_check_is_found(monkeypatch):
    right = kvquant.dequant_rope_quant_kvcache

    def lenient(**arguments):
        scale = arguments["scale_v"]
        if isinstance(scale, np.ndarray) and scale.dtype == np.float32 and scale.dtype.isnative:
            arguments["scale_v"] = np.where(np.isfinite(scale) & (scale != 0), scale, np.float32(1)).reshape(scale.shape)
        return right(**arguments)

    monkeypatch.setattr(kvquant, "dequant_rope_quant_kvcache", lenient)
    _, _, failures = fuzz.fuzz(seed=5, first=0, step=1, seconds=20)
    assert failures and "scale_v" in failures[0][1]


def test_command_line():
    script = Path(fuzz.__file__)
    done = subprocess.run([sys.executable, script, "--seconds", "2", "--seed", "3", "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 0 and "0 differences" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([sys.executable, script, "--seed", "3", "--case", "17"], capture_output=True, text=True)
    assert done.returncode == 0 and "no difference" in done.stdout, done.stdout + done.stderr

"""The benchmarks under bench/ work: they run, check bytes, and print figures that can be true. Nothing here judges speed."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import kvquant
import pytest

BENCH = Path(__file__).parent.parent / "bench"


def run_bench(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_sane(row, tokens):
    assert 0 < row["p10"] <= row["p90"] and row["p10"] <= row["us"] <= row["p90"] and row["samples"] >= 3, row
    assert row["ns_per_token"] == pytest.approx(1e3 * row["us"] / tokens)
    assert 0 < row["gb_per_s"] < 10_000, row


def test_run_smoke(tmp_path):
    done = run_bench(BENCH / "run.py", "--smoke", "--isa", "all", "--json", tmp_path / "rows.jsonl")
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "rows.jsonl")
    ours = [row for row in rows if row["call"] != "np.add"]
    expected = itertools.product(("hot", "rows", "cold"), ("out", "plan", "alloc"), kvquant.isa.available())
    assert {(row["state"], row["call"], row["isa"]) for row in ours} == set(expected)
    assert len(rows) == len(ours) + 3
    for row in ours:
        assert_sane(row, tokens=1)
        assert row["bytes"] == "equal" and row["threads"] == 1
        assert row["share"] == pytest.approx(row["limit_us"] / row["us"]) and 0 < row["share"] < 1, row
    header, _, *lines = done.stdout.splitlines()
    assert len(lines) == len(rows) and {line.count("|") for line in lines} == {header.count("|")}


def test_run_fails_where_a_byte_differs():
    done = run_bench("-c", f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import run
right = run.kvquant_call
def wrong(w, operands, *how):
    call = right(w, operands, *how)
    def damaged():
        call()
        operands["v_cache"][-1, -1, -1, -1] ^= 1
    return damaged
run.kvquant_call = wrong
sys.exit(run.main(["--smoke", "--state", "hot"]))
""")
    assert done.returncode == 1 and "2 DIFFER" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name, tokens, useful", [
    ("W1", 320, 2_718_208), ("W2", 64, 1_491_200), ("W3", 2048, 72_433_664), ("W4", 1, 6_660), ("W5", 256, 1_379_328)])
def test_useful_bytes(name, tokens, useful):
    done = run_bench("-c", f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import workloads
w, = workloads.load({name!r})
print(w.tokens, workloads.useful_bytes(w, workloads.operand_sets(w, "hot")[0]))
""")
    assert done.stdout.split() == [str(tokens), str(useful)], done.stderr


def test_compare_peers_without_any_peer_installed(tmp_path):
    done = run_bench(BENCH / "compare_peers.py", "W4", "--peers", "limit,kvquant,numpy,vllm", "--vllm-python", tmp_path / "none",
                     "--rounds", "2", "--burst", "0.002", "--patience", "0", "--json", tmp_path / "rows.jsonl")
    assert done.returncode == 0, done.stderr
    assert f"W4: vllm is missing: no {tmp_path / 'none'}" in done.stderr
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {row["variant"] for row in rows} >= {"limit", "kvquant out", "kvquant plan", "NumPy"}
    for row in rows:
        assert_sane(row, tokens=1)
        assert row["differing"] == (None if row["peer"] == "limit" else 0)
    assert "| **kvquant** |" in done.stdout and "| NumPy |" in done.stdout

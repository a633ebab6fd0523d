"""Prints workloads.toml as initialisers of struct Workload in driver.cpp: python bench/workloads_header.py > workloads.inc

CMake runs it when it configures; needs no package but, before Python 3.11, tomli.
"""
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

for name, w in tomllib.loads(Path(__file__).with_name("workloads.toml").read_text()).items():
    sizes = ", ".join(str(w[key]) for key in ("batch", "sequence", "heads_q", "heads_kv", "dim"))
    types = ", ".join(f"DType::{w[key]}" for key in ("x", "output", "bias"))
    flags = ", ".join(str(flag).lower() for flag in (w["offsets"], w["kv_output"], w["layout"] == "HND"))
    blocks, slots = w["cache"]
    print(f'{{"{name}", {sizes}, {types}, {flags}, CacheMode::{w["cache_mode"]}, {blocks}, {slots}, {w["calls"]}}},')

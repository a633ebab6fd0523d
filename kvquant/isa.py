"""Which instruction sets ("targets") the compiled kernels can use here. A target is forced by the environment variable
KVQUANT_ISA for the process (read once, at the first call; empty counts as unset) or by `isa=` for one call, which wins.
"""
from kvquant import _core

__all__ = ["active", "available", "missing"]


def active() -> str:
    """The target that calls without `isa=` use.

    Raises ValueError if KVQUANT_ISA names no target, RuntimeError if it names one that this machine can't run.
    """
    return _core.active()


def available() -> list[str]:
    """Names of the targets that this machine can run, best first."""
    return [name for name, reason in zip(_core.target_names(), _core.missing_features()) if reason is None]


def missing() -> dict[str, str]:
    """Targets that this build has but this machine can't run: name to the first feature it lacks."""
    return {name: reason for name, reason in zip(_core.target_names(), _core.missing_features()) if reason is not None}

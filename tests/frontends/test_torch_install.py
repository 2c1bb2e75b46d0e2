"""Effects of installing multiring on torch, and of importing either on the other."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest


def python(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(code: str, *prefixes: str) -> list[str]:
    """The modules of some packages that a fresh interpreter has loaded after ``code``."""
    return python(f"{code}; import sys; print(*(m for m in sys.modules if m.split('.')[0] in {prefixes!r}))").split()


def test_multiring_does_not_import_torch() -> None:
    assert not loaded("import multiring; multiring.init(); multiring.shutdown()", "torch")


def test_registering_loads_nothing_but_the_entry() -> None:
    found = loaded("import torch; from multiring._torch_entry import register; register()", "multiring")
    assert sorted(found) == ["multiring", "multiring._torch_entry", "multiring.version"]


def test_registering_survives_a_torch_without_distributed() -> None:
    code = """
import sys, types
torch = types.ModuleType("torch")
sys.modules["torch"] = torch
sys.modules["torch.distributed"] = None
from multiring._torch_entry import register
register()
"""
    python(code)


@pytest.mark.skipif(not entry_points(group="torch.backends", name="multiring"), reason="multiring is not installed")
def test_an_installed_multiring_is_known_without_importing_it() -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("multiring", store=dist.HashStore(), rank=0, world_size=1)
import torch
x = torch.arange(3.0)
dist.all_reduce(x)
print(dist.get_backend(), x.tolist())
import multiring
assert "all_reduce" in str(multiring.plan(1 << 20))
print(multiring.world_size())
dist.destroy_process_group()
"""
    assert python(code, "-W", "error::UserWarning").split("\n") == ["multiring [0.0, 1.0, 2.0]", "1"]

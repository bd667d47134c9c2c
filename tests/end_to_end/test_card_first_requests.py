"""No request waits for a compiler: what the usual ones need is there when the engine is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "card" / "first_requests.py"


def test_a_started_engine_compiles_nothing_more():
    """In a process of its own: kernels that another test has loaded would hide one."""
    command = [sys.executable, "-P", str(SCRIPT)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    compiled = json.loads(found.stdout.splitlines()[-1])["compiled"]
    assert compiled
    late = {kind: names for kind, names in compiled.items() if names}
    assert not late, f"compiled when requests came: {late}"

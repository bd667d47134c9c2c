"""Makes `tests/support/` importable as `test_support`, whatever file a test sits in.

importlib mode keeps the tests' folders off sys.path, so the package is entered by hand, once.
Knows nothing of what the helpers do.
"""

import pathlib
import sys
import types

_support = types.ModuleType("test_support")
_support.__path__ = [str(pathlib.Path(__file__).parent / "support")]
sys.modules.setdefault("test_support", _support)

"""The frontend loads no torch. Knows nothing of what it does."""

import subprocess
import sys

CODE = """
import asyncio, sys
import zipage_lang.frontend.llm
import zipage_lang.cli
from zipage_lang.frontend.client import EngineClient
from zipage_lang.runtime.config import EngineConfig

async def work():
    client = await EngineClient.start(EngineConfig(), command=sys.argv[1:])
    await client.close()

asyncio.run(work())
print([name for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""


def test_frontend_cli_and_client_load_neither_torch_nor_transformers(command):
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, *command],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "[]"

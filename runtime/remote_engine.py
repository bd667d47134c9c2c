"""An engine that clients join over TCP, one at a time: loaded once, it outlives them.

Knows nothing of keys, of scheduling or of tensors.
"""

import signal
from collections.abc import Callable

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.engine_process import EngineProcess, set_up_log
from zipage_lang.runtime.garbage import calm_garbage_collector
from zipage_lang.runtime.remote_line import RemoteLine

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve_engine(
    config: EngineConfig, address: str, keys_folder: str, on_ready: Callable[[str], None]
) -> None:
    """Listen, load, and serve until SIGTERM or SIGINT. `on_ready` gets the address.

    Who connects while it loads is answered when it has. Raises ValueError for an address or keys
    that won't do, and what a start raises.
    """
    set_up_log()
    line = RemoteLine(address, keys_folder)
    try:
        process = EngineProcess(Engine(config), line)
        calm_garbage_collector()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: process.stop())
        on_ready(line.address)
        process.run()
    finally:
        line.close()

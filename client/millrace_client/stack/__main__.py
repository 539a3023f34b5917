"""`python -m millrace_client.stack`: the supervisor as its own process, which `millrace up` starts.

The options come as one JSON argument. With `lifeline`, standard input is a pipe from the parent. If it closes without
the word `keep`, the parent has died, and the stack ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from millrace_client.stack.supervisor import (
    AlreadyRunning,
    StackOptions,
    StartFailed,
    Supervisor,
    hold_home,
    make_plan,
    say_with_time,
)

KEEP = "keep"


def main() -> int:
    arguments = json.loads(sys.argv[1])
    home = Path(arguments["home"])
    options = StackOptions(
        store=arguments["store"],
        import_roots=tuple(Path(root) for root in arguments["import_roots"]),
        ray_cpus=arguments["ray_cpus"],
    )
    try:
        with hold_home(home):
            supervisor = Supervisor(make_plan(home, options), say_with_time, owns_process=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: supervisor.stop())
            # The terminal that started it may close.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if arguments["lifeline"]:
                threading.Thread(target=_watch_lifeline, args=(supervisor,), daemon=True).start()
            supervisor.run()
    except (StartFailed, AlreadyRunning) as error:
        say_with_time(f"error: {error}")
        return 1
    return 0


def _watch_lifeline(supervisor: Supervisor) -> None:
    # os.read is used because a thread must not hold the lock of sys.stdin when the interpreter ends.
    said = b""
    while more := os.read(0, 64):
        said += more
    if said != KEEP.encode():
        supervisor.stop()


if __name__ == "__main__":
    sys.exit(main())

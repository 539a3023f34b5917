"""The cost of tracing in the frontend: its CPU per request with tracing off, on but not recorded, and recorded.

It runs the frontend's own servicer, batcher and interceptor behind a real socket, with a model that answers at once, so
that the figures cover nothing else. Each turn uses new processes. The last line is one JSON object.

    python -m benchmarks.serve_tracing [--repeats 5] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from typing import Any

from millrace_client.load import Plan, closed_loop
from shared.logging_and_tracing import configure_tracing
from tests.support.inference_server import ask, inference_server
from tests.support.otlp_receiver import otlp_receiver

MODES = {"off": "", "not recorded": "00", "recorded": "01"}
IN_FLIGHT, WARM_UP_S = 8, 1.0
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-tracing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(given.repeats + 1):  # the first turn warms up
        for mode in MODES:
            took_us = _turn(mode, given.seconds)
            if number:
                found[mode].append(took_us)
                print(f"{mode}: {took_us:.0f} us of CPU a request", flush=True)
    print(
        json.dumps(
            {
                "front_cpu_us_a_request": {mode: round(statistics.median(one), 1) for mode, one in found.items()},
                "spread": {mode: [round(min(one), 1), round(max(one), 1)] for mode, one in found.items()},
            }
        )
    )


def _turn(mode: str, seconds: float) -> float:
    spawn = multiprocessing.get_context("spawn")
    with otlp_receiver() as receiver:
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(theirs, receiver.environ if MODES[mode] else {}))
        server.start()
        try:
            address = ours.recv()
            metadata = (("traceparent", TRACEPARENT + MODES[mode]),) if MODES[mode] else ()
            request = ask(1).SerializeToString()
            plan: dict[str, Any] = {"address": address, "requests": [request], "metadata": metadata}
            closed_loop(Plan(seconds=WARM_UP_S, warm_up_s=0.0, **plan), IN_FLIGHT)
            ours.send("begin")
            answered = len(closed_loop(Plan(seconds=seconds, warm_up_s=0.0, **plan), IN_FLIGHT).outcomes)
            ours.send("end")
            spent_s: float = ours.recv()
        finally:
            server.kill()  # SIGTERM would only stop its server
            server.join()
    return spent_s / answered * 1e6


def _serve(pipe: Any, environ: dict[str, str]) -> None:
    """Answer until it is killed; report the CPU time from "begin" to "end"."""
    os.environ.update(environ)
    configure_tracing("inference", os.environ)

    async def run() -> None:
        async with inference_server() as server:
            pipe.send(server.kit.address)
            await asyncio.to_thread(pipe.recv)
            began_s = time.process_time()
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time() - began_s)
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()

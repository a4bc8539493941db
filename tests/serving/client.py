"""Starts ``freescale serve`` in a forked process, and sends requests to it."""

from __future__ import annotations

import csv
import json
import multiprocessing
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.free_ports import free_port
from lightning_freescale.cli.main import main

DEADLINE_S = 60


class Client:
    """``get`` and ``post`` return the status and the content."""

    def __init__(self, address: str, process: Any = None):
        self.address, self.process = address, process

    def get(self, path: str) -> tuple[int, Any]:
        return self._send(urllib.request.Request(f"{self.address}{path}"))

    def post(self, body: Any, path: str = "/recommend") -> tuple[int, Any]:
        """``body``: text, or an object that becomes JSON."""
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return self._send(urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            return error.code, _content(error)

    def metric(self, name: str) -> float:
        """The value of a metric, by its name with labels."""
        rows = dict(line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines() if not line.startswith("#"))
        return float(rows[name])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            assert self.process is None or self.process.exitcode is None, "the server has ended"
            time.sleep(0.05)
        raise TimeoutError(f"{self.address} did not answer")


def _content(answer: Any) -> Any:
    text = answer.read().decode()
    return json.loads(text) if answer.headers.get_content_type() == "application/json" else text


def _run(arguments: Sequence[str], log: str) -> None:
    with Path(log).open("w", buffering=1) as output, redirect_stdout(output):
        code = main(["serve", *arguments])
    sys.exit(code)


@contextmanager
def serving(model: Path, folder: Path, *arguments: str) -> Iterator[Client]:
    """A server of ``model`` on a free port. It is killed at the end if it still runs. Its output is in ``folder/serve.log``."""
    port = free_port()
    command = [str(model), "--port", str(port), "--cache-dir", str(folder / "cache"), *arguments]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command, str(folder / "serve.log")))
    process.start()
    try:
        client = Client(f"http://127.0.0.1:{port}", process)
        client.wait_until_ready()
        yield client
    finally:
        process.kill()
        process.join(DEADLINE_S)


def histories_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By user, the events of a CSV file of ``tests.inference.trained`` as a request has them."""
    found: dict[str, list[dict[str, Any]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            event = {"item": row["item_id"], "time": int(row["timestamp"]), "features": {"genre": row["genre"]}}
            found.setdefault(row["user_id"], []).append(event)
    return found

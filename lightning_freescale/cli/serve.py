"""``freescale serve``: answers requests for recommendations over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_freescale.cli.recommender_files import (
    MODEL_HELP,
    add_event_arguments,
    event_options,
    load_recommender,
)
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.serving.service import RecommendationService

STOP_SECONDS = 30  # how long requests may go on after a signal to stop
NEEDED = ("fastapi", "uvicorn", "pydantic")


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Answer POST /recommend with the best items of a user. The page at / shows a history and the "
        "recommendations. /health and /metrics are for supervision. An exported model needs no TorchRec. SIGTERM and Ctrl-C stop "
        "the server after it has answered the requests that wait.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="requests computed together (default: %(default)s)"
    )
    parser.add_argument(
        "--max-wait-ms",
        type=float,
        default=5.0,
        metavar="MS",
        help="how long a request waits for others (default: %(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=1000,
        metavar="N",
        help="more waiting requests get 503 (default: %(default)s)",
    )
    parser.add_argument("--keep-seen", action="store_true", help="also recommend items that are in the user's history")
    parser.add_argument(
        "--cache-users",
        type=int,
        default=10_000,
        metavar="N",
        help="users whose states are kept, for models with personal tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--states", type=Path, metavar="FILE", help="Parquet file of the states: read at the start, written at the end"
    )
    parser.add_argument(
        "--data", metavar="DATA", help="a file of events, for requests without events and for the users of the page"
    )
    add_event_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``freescale serve``; returns the exit code when the server has stopped."""
    options = _parser(prog).parse_args(argv)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"serve: {' and '.join(missing)} cannot be imported. Run: pip install fastapi uvicorn (the extra serve of this "
            "package installs them, too)"
        )
    for name, least in (("max_batch", 1), ("max_wait_ms", 0), ("max_waiting", 1), ("cache_users", 1)):
        if (value := getattr(options, name)) < least:
            raise ConfigurationError(f"--{name.replace('_', '-')}: must be at least {least}, not {value}")
    how = event_options(options)
    recommender = load_recommender(options.model)
    service = RecommendationService(recommender, filter_seen=not options.keep_seen, cache_users=options.cache_users)
    if options.states is not None and not recommender.has_states:
        raise ConfigurationError("--states: the model has no personal tokens, so its users have no states")
    if options.states is not None and options.states.exists():
        print(f"{options.states}: the states of {service.load_states(options.states):,} users")
    histories = None if options.data is None else recommender.read_events(options.data, **how)
    return _serve(service, histories, options)


def _serve(service: RecommendationService, histories: object, options: argparse.Namespace) -> int:
    import uvicorn

    from lightning_freescale.serving.app import ServeOptions, create_app
    from lightning_freescale.serving.known_histories import KnownHistories

    known = None if histories is None else KnownHistories(histories, service)  # type: ignore[arg-type]
    how = ServeOptions(options.max_batch, options.max_wait_ms, options.max_waiting, states=options.states)
    app = create_app(service, how, known)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=STOP_SECONDS)
    server = uvicorn.Server(config)
    with _listening(options.host, options.port) as listening:
        port = listening.getsockname()[1]
        items = service.recommender.num_items
        print(f"{options.model}: {items:,} items on http://{options.host}:{port} (stop with Ctrl-C)", flush=True)
        with _signals_only_stop():
            server.run(sockets=[listening])
    if not server.started:
        return 1
    print("stopped", flush=True)
    return 0


@contextmanager
def _signals_only_stop() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the server and not the process: uvicorn sends them again after it has stopped."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens already when the address is printed."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigurationError(f"--host, --port: cannot listen on {host}:{port}: {error}") from error

"""``freescale serve`` over HTTP: answers, bad requests, metrics, the end, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lightning_freescale.cli.main import main
from tests.cli import browser as browsers
from tests.inference.trained import USERS, Trained, train
from tests.serving.client import DEADLINE_S, Client, histories_of, serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).resolve().parents[2]
GOOD = {"item": "film-1é", "time": 10, "features": {"genre": "drama"}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("serve"), tokens=True)


@pytest.fixture(scope="module")
def server(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("server")
    with serving(trained.exported, folder, "--data", str(trained.events)) as client:
        yield client


def pairs(answer: Any) -> list[tuple[Any, float]]:
    return [(one["item"], one["score"]) for one in answer["recommendations"]]


def check(found: list[tuple[Any, float]], wanted: list[tuple[Any, float]]) -> None:
    assert [item for item, _ in found] == [item for item, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-6)


# ---- answers -----------------------------------------------------------------------------------------------------------
def test_served_answers_are_those_of_the_command(trained: Trained, server: Client, tmp_path: Path) -> None:
    """All users at once, with the events of the request and with those of the server's file, from states and without."""
    output, cache = tmp_path / "out.parquet", str(tmp_path)
    command = ["recommend", str(trained.exported), str(trained.events), "--output", str(output), "--k", "5"]
    assert main([*command, "--cache-dir", cache]) == 0
    wanted: dict[str, list[tuple[Any, float]]] = {}
    for row in pyarrow.parquet.read_table(output).to_pylist():
        wanted.setdefault(row["user"], []).append((row["item"], row["score"]))
    assert len(wanted) == USERS
    histories = histories_of(trained.events)
    bodies = [{"user": user, "k": 5, "events": histories[user]} for user in wanted]
    bodies += [{"user": user, "k": 5} for user in wanted]
    before = server.metric("freescale_batch_size_sum")
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(server.post, bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert status == 200, answer
        check(pairs(answer), wanted[str(body["user"])])
        assert (answer["user"], answer["unknown_events"]) == (body["user"], 0)
        assert answer["known_events"] == len(histories[str(body["user"])])
    assert server.metric("freescale_batch_size_sum") - before == len(bodies)
    longest = max(histories, key=lambda user: len(histories[user]))
    assert server.post({"user": longest})[1]["state"] == "cached"
    other = next(user for user in wanted if wanted[user] != wanted[longest])  # the comparison can fail
    with pytest.raises(AssertionError):
        check(wanted[other], wanted[longest])


def test_unknown_items_are_counted(server: Client) -> None:
    unknown = {"item": 3, "time": 11, "features": {"genre": "drama"}}
    status, answer = server.post({"user": 7, "events": [GOOD, unknown], "k": 2})
    assert status == 200
    assert (answer["user"], answer["known_events"], answer["unknown_events"]) == (7, 1, 1)
    assert len(answer["recommendations"]) == 2
    assert "film-1é" not in [item for item, _ in pairs(answer)]
    assert server.metric("freescale_unknown_events_total") >= 1


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ('{"user": ', 422, "body"),
        ("[]", 422, "body"),
        ({"events": [GOOD]}, 422, "user"),
        ({"user": 1.5, "events": [GOOD]}, 422, "user"),
        ({"user": "ann", "events": []}, 422, "events"),
        ({"user": "ann", "events": "film"}, 422, "events"),
        ({"user": "ann", "events": [GOOD, True]}, 422, "events.1"),
        ({"user": "ann", "events": [GOOD, {"time": 3}]}, 422, "events.1.item"),
        ({"user": "ann", "events": [{**GOOD, "item": None}]}, 422, "events.0.item"),
        ({"user": "ann", "events": [{**GOOD, "time": -1}]}, 422, "events.0.time"),
        ({"user": "ann", "events": [{**GOOD, "time": "noon"}]}, 422, "events.0.time"),
        ({"user": "ann", "events": [{**GOOD, "features": {"genre": []}}]}, 422, "events.0.features.genre"),
        ({"user": "ann", "events": [{**GOOD, "tiem": 1}]}, 422, "events.0.tiem"),
        ({"user": "ann", "events": ["film-1é"]}, 422, "events.0.features.genre"),
        ({"user": "ann", "events": [{**GOOD, "item": "no such film"}]}, 422, "events"),
        ({"user": "ann", "events": [GOOD], "k": 0}, 422, "k"),
        ({"user": "ann", "events": [GOOD], "k": 41}, 422, "k"),
        ({"user": "ann", "events": [GOOD], "k": "5"}, 422, "k"),
        ({"user": "nobody"}, 404, "user"),
    ],
)
def test_bad_requests_name_the_field(server: Client, body: Any, status: int, field: str) -> None:
    found, answer = server.post(body)
    assert found == status, answer
    assert [error["field"] for error in answer["errors"]] == [field]
    assert answer["errors"][0]["message"]


@pytest.mark.parametrize(("size", "status"), [("99999999", 413), (None, 411)])
def test_bodies_of_unknown_or_large_size_are_refused_unread(server: Client, size: str | None, status: int) -> None:
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=DEADLINE_S)
    connection.putrequest("POST", "/recommend")
    connection.putheader(*(("Content-Length", size) if size else ("Transfer-Encoding", "chunked")))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["errors"][0]["field"] == "body"
    connection.close()


def test_supervision(server: Client) -> None:
    assert server.get("/health")[0] == 200
    before = server.metric('freescale_requests_total{code="200"}')
    timed = server.metric("freescale_request_seconds_count")
    assert server.post({"user": "ann", "events": [GOOD]})[0] == 200
    assert server.post({"user": "ann", "events": []})[0] == 422
    assert server.metric('freescale_requests_total{code="200"}') == before + 1
    assert server.metric("freescale_request_seconds_count") == timed + 2
    assert server.get("/history?user=user-1")[1]["events"][0]["item"] == "film-11é"
    assert server.get("/history?user=nobody")[0] == 404
    assert server.get("/nothing")[0] == 404


# ---- the end -----------------------------------------------------------------------------------------------------------
def test_a_signal_stops_the_server_after_the_last_answer(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that waits for its batch is answered. The states are written, and a second server reads them."""
    states = tmp_path / "states.parquet"
    user, events = max(histories_of(trained.events).items(), key=lambda item: len(item[1]))
    options = ["--states", str(states), "--max-wait-ms", "3000"]
    with serving(trained.exported, tmp_path, *options) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, {"user": user, "events": events})
        deadline = time.monotonic() + DEADLINE_S
        while client.metric("freescale_waiting_requests") < 1:
            assert time.monotonic() < deadline
        os.kill(client.process.pid, signal.SIGTERM)
        assert waiting.result(DEADLINE_S)[0] == 200
        client.process.join(DEADLINE_S)
        assert client.process.exitcode == 0
    assert (tmp_path / "serve.log").read_text().endswith("stopped\n")
    with serving(trained.exported, tmp_path, "--states", str(states)) as client:
        assert client.post({"user": user, "events": events})[1]["state"] == "cached"
        assert client.post({"user": user})[1]["errors"][0]["field"] == "events"  # there is no file of events
    assert (tmp_path / "serve.log").read_text().startswith(f"{states}: the states of 1 users\n")
    states.write_bytes(b"PAR1")
    assert main(["serve", str(trained.exported), "--states", str(states)]) == 1
    assert f"{states}: it cannot be read as states of users" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fastapi" else object())
    assert main(["serve", str(trained.exported)]) == 1
    assert "serve: fastapi cannot be imported. Run: pip install fastapi uvicorn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batch", "0"], "--max-batch: must be at least 1, not 0"),
        (["--cache-users", "0"], "--cache-users: must be at least 1, not 0"),
        (["--host", "256.1.1.1"], "--host, --port: cannot listen on 256.1.1.1:8000"),
        (["--data", "nowhere.csv"], "data: nowhere.csv does not exist"),
    ],
)
def test_bad_arguments_are_named(
    trained: Trained, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["serve", str(trained.exported), *arguments]) == 1
    assert message in capsys.readouterr().err


# ---- the page ----------------------------------------------------------------------------------------------------------
def wait_for(browser: browsers.Browser, expression: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not browser.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression}: {browser.evaluate('document.body.innerText')}"
        time.sleep(0.05)


def overflows(browser: browsers.Browser) -> list[str]:
    """Elements that reach beyond the right edge of the window."""
    return browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.tagName + '#' + e.id)"
    )


@pytest.mark.skipif(browsers.CHROMIUM is None, reason="chromium is not installed")
def test_the_page_in_a_browser(server: Client, tmp_path: Path) -> None:
    rows = "[...document.querySelectorAll('#{} tbody tr')].map(r => r.cells[{}].firstChild.textContent)"
    with browsers.Browser(tmp_path / "profile") as browser:
        for width, scheme in ((400, "light"), (1400, "dark")):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
            )
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.open(server.address)
            wait_for(browser, "document.body.dataset.ready === 'yes'")
            assert browser.evaluate("document.getElementById('users').options.length") == USERS
            browser.evaluate("document.getElementById('user').value = 'user-3'")
            browser.click("#load")
            wait_for(browser, "document.querySelectorAll('#history tbody tr').length > 0")
            wanted = [event["item"] for event in server.get("/history?user=user-3")[1]["events"]]
            assert browser.evaluate(rows.format("history", 0)) == wanted[::-1]
            browser.click("#ask button[type=submit]")
            wait_for(browser, "document.querySelectorAll('#found tbody tr').length > 0")
            answer = server.post({"user": "user-3"})[1]
            assert browser.evaluate(rows.format("found", 1)) == [item for item, _ in pairs(answer)]
            assert "9 known events" in browser.evaluate("document.getElementById('found-note').textContent")
            assert overflows(browser) == []
            dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 27, 33)"
            assert dark == (scheme == "dark")
        # Another event changes the list, and a wrong item is explained.
        form = "document.querySelector('#add').elements"
        browser.evaluate(f"{form}['new-item'].value = 'film-39é'; {form}.time.value = 2000000")
        browser.click("#add button[type=submit]")
        assert browser.evaluate(rows.format("history", 0))[0] == "film-39é"
        browser.click("#ask button[type=submit]")
        wait_for(browser, "document.getElementById('found-note').textContent.includes('10 known events')")
        assert browser.complaints() == []
        assert all(url.startswith((server.address, "data:")) for url in browser.requested())
        browser.evaluate("document.getElementById('user').value = 'nobody'; document.getElementById('load').click()")
        wait_for(browser, "document.getElementById('problem').textContent.includes(\"'nobody' is not in\")")
        assert len(browser.complaints()) == 1  # the browser reports the status 404, so the check above can fail
        browser.evaluate("document.getElementById('about').style.width = '3000px'")
        assert overflows(browser) == ["P#about"]

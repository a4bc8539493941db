"""Draws ``docs/report.png``: the report page of two synthetic runs in Chromium. ``python -m tests.cli.report_picture``."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.cli import report
from tests.bubbles.synthetic_runs import write_run
from tests.cli.browser import Browser

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "report.png"
WIDTH, TOP, HEIGHT = 1000, 0, 1500  # pixels


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uneven = [(12.0 + step % 5, 48.0 - step % 7) for step in range(40)]
        even = [(30.0 + step % 2, 31.0) for step in range(40)]
        runs = [
            write_run(folder / "before", uneven, settings={"balance": "off"}),
            write_run(folder / "after", even, settings={"balance": "fixed"}),
        ]
        text = (
            report.page([analyse(read_run(run)) for run in runs])
            .replace(f"{folder}/", "")
            .replace("Made(", "FreeScaleStrategy(")
        )
        (folder / "page.html").write_text(text)
        with Browser(folder / "profile") as browser:
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
            )
            browser.open(folder / "page.html")
            clip = {"x": 0, "y": TOP, "width": WIDTH, "height": HEIGHT, "scale": 1}
            picture = browser.call("Page.captureScreenshot", format="png", clip=clip)["data"]
    PICTURE.write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main()

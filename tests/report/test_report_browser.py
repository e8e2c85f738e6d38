"""Reports in a browser: no console errors, pictures that are really visible, light and dark, offline.

Run where a Chromium is installed.
"""

import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from tests.report.test_report import make

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium binary")

WIDTH, HEIGHT = 900, 2400
PROBE = """<script>
addEventListener("load", () => {
  const seen = [...document.images].map(i => `${i.naturalWidth > 0 && i.getBoundingClientRect().width > 200}`);
  const loaded = performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length;
  document.body.dataset.pictures = seen.join(" ");
  document.body.dataset.loaded = loaded;
  document.body.dataset.wider = document.documentElement.scrollWidth > innerWidth;
});
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    report = make()
    return report, report.save(tmp_path_factory.mktemp("report") / "report.html")


def browse(profile, url, *options):
    """Chromium on one page, with a profile of its own and no business on the network."""
    switches = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}",
    ]  # fmt: skip
    result = subprocess.run(
        [CHROMIUM, *switches, *options, url.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return result.stdout, console


def test_it_opens_without_console_errors_and_loads_nothing_else(page, tmp_path):
    report, path = page
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|srcset)\s*=\s*["'](?!data:)|url\((?!["']?data:)|@import""", text)
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    document, console = browse(tmp_path / "profile", probed, "--dump-dom")
    assert console == []
    (pictures,) = re.findall(r'data-pictures="([^"]*)"', document)
    assert pictures.split() == ["true"] * len(report.figures)
    assert len(report.figures) >= 1
    assert 'data-loaded="0"' in document
    assert 'data-wider="false"' in document


@pytest.mark.parametrize(("options", "is_dark"), [([], False), (["--force-dark-mode"], True)], ids=["light", "dark"])
def test_its_colours_and_pictures_follow_the_screen(page, options, is_dark, tmp_path):
    _, path = page
    browse(tmp_path / "profile", path, f"--screenshot={tmp_path / 'shot.png'}", *options)
    pixels = matplotlib.image.imread(tmp_path / "shot.png")[..., :3]
    ground = pixels[2, 2].mean()
    assert (ground < 0.2) == is_dark
    assert (ground > 0.8) != is_dark
    # The pictures' grounds too: hardly anything in the page is of the other kind than its ground.
    other = (pixels.mean(-1) > 0.8) if is_dark else (pixels.mean(-1) < 0.2)
    assert other.mean() < 0.05
    # And there is colour in it, which only pictures have in any amount.
    colourful = np.ptp(pixels, axis=-1) > 0.3
    assert colourful.mean() > 0.0005


def test_a_console_error_or_a_missing_picture_would_be_seen(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(f'<body><img src="data:image/png;base64,AAAA"><script>nothing()</script>{PROBE}', encoding="utf-8")
    document, console = browse(tmp_path / "profile", path, "--dump-dom")
    assert any("ReferenceError" in line for line in console)
    assert 'data-pictures="false"' in document

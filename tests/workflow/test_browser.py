"""The pages that people look at, in a real browser: whole, quiet, offline, and no wider than their window."""

from __future__ import annotations

import os

import pytest
from browser import Browser, missing

pytestmark = pytest.mark.ci

PAGES = ("report/index.html", "audits/summary/index.html")
WIDTHS = (1280, 500)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return a window; without a browser the tests are skipped, or fail where there must be one."""
    if missing():
        needed = os.environ.get("DPMIXMIN_NEEDS_BROWSER") == "1"
        (pytest.fail if needed else pytest.skip)(f"no browser: apt-get install {' '.join(missing())}")
    with Browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_quiet_and_fits_its_window(page, width, finished, browser):
    browser.open(finished.path / "results/mini/study" / page, width)
    assert browser.complaints() == []
    assert browser.run("return document.querySelectorAll('h1').length") == 1
    assert browser.run("return document.querySelectorAll('h2, h3').length") > 2
    # Everything stands in the file: nothing is asked of another one, let alone of another machine.
    assert browser.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.run("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == []
    assert browser.run("return document.querySelectorAll('svg, img').length") > 0
    # Wide tables scroll in their own boxes.
    assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    hidden = "return [...document.querySelectorAll('svg')].filter(s => !s.getBoundingClientRect().width).length"
    assert browser.run(hidden) == 0


def test_links_to_files_lead_somewhere(finished, browser):
    folder = finished.path / "results/mini/study/report"
    browser.open(folder / "index.html", 1280)
    links = browser.run("return [...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    files = [link for link in links if not link.startswith(("#", "http"))]
    assert files
    assert [link for link in files if not (folder / link).exists()] == []
    inside = [link[1:] for link in links if link.startswith("#")]
    assert [name for name in inside if not browser.run(f"return !!document.getElementById({name!r})")] == []


def test_the_check_sees_what_is_wrong(tmp_path, browser):
    page = tmp_path / "page.html"
    page.write_text("<h1>x</h1><img src='none.png'><p style='width: 3000px'>wide</p><script>undefined.x</script>")
    browser.open(page, 1280)
    said = " ".join(browser.complaints())
    assert "none.png" in said
    assert "TypeError" in said
    assert browser.run("return [...document.images].filter(i => !i.naturalWidth).length") == 1
    assert browser.run("return document.documentElement.scrollWidth - window.innerWidth") > 0

"""The documentation site builds without warnings, and its links, pages and search work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does, with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    result = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder


class Page(HTMLParser):
    """The links, the loaded files and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := attributes.get(key))}
        if tag == "a" and attributes.get("href"):
            self.links.append(str(attributes["href"]))
        for key in ("src", "href") if tag in ("script", "img", "link") else ():
            if attributes.get(key) and attributes.get("rel") != "canonical":
                self.loaded.append(str(attributes[key]))


def test_links_are_valid_and_no_file_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 20
    count = 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                assert link not in page.loaded, f"{path.name} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name}: {link}"
            if target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"
            count += 1
    assert count > 1000


def test_the_reference_has_all_public_names(site: Path) -> None:
    import kronbit

    anchors = Page(site / "reference.html").anchors
    for name in kronbit.__all__:
        assert any(anchor.endswith(f".{name}") for anchor in anchors), name


def test_every_page_is_in_the_navigation(site: Path) -> None:
    links = {link.partition("#")[0] for link in Page(site / "index.html").links}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name in links, name


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # a page requests all its images at once


def test_pages_work_in_a_browser(site: Path, browser: Any) -> None:
    """Pages have no errors and no missing images, fit the window, and can be searched."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            check_pages(browser, address, site)
            assert "Björck" in search(browser, address, "rectification")
        finally:
            server.shutdown()
    errors = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert not [message for message in errors if "favicon" not in message]


def wait_for(browser: Any, selector: str) -> Any:
    """Return the first matching element; scripts may add it after the page is loaded."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def find(driver: Any) -> Any:
        complete = driver.execute_script("return document.readyState") == "complete"
        return complete and driver.find_elements(By.CSS_SELECTOR, selector)

    return WebDriverWait(browser, 30).until(find)[0]


def check_pages(browser: Any, address: str, site: Path) -> None:
    """Assert that pages fit narrow and wide windows and show all images."""
    all_names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    for width, names in ((400, all_names), (1280, ["index.html", "results/cifar100.html"])):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for name in names:
            browser.get(f"{address}/{name}")
            wait_for(browser, "h1")
            wide, images = browser.execute_script(
                "return [document.documentElement.scrollWidth,"
                " [...document.images].map(e => [e.src, e.complete && e.naturalWidth])]"
            )
            assert wide <= width, (name, width)
            assert all(loaded for _, loaded in images), (name, images)


def search(browser: Any, address: str, text: str) -> str:
    """Return the text of the search results."""
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"{address}/index.html")
    wait_for(browser, ".md-search__input").click()
    browser.switch_to.active_element.send_keys(text)
    wait_for(browser, ".md-search-result__item")
    shown: str = wait_for(browser, ".md-search-result__list").text
    return shown

"""Predictions that are drawn, and a real headless browser for pages; tests are skipped where there
is none."""

import shutil

import pytest

from perfmodel.prediction import predict

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install perfmodel[browser]"
    )
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(
                executable_path=path,
                args=["--no-sandbox"],
                # People have scroll bars.
                ignore_default_args=["--hide-scrollbars"],
            )
        except api.Error as error:
            pytest.skip(f"no browser to start: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens HTML offline; fails the test on a script error or on any request but that of the
    file."""
    context = browser.new_context(viewport={"width": 1100, "height": 700}, offline=True)
    trouble = []

    def opened(html):
        (tmp_path / "t.html").write_text(html, encoding="utf-8")
        page = context.new_page()
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on(
            "request",
            lambda r: trouble.append(r.url) if not r.url.endswith(("t.html", "srcdoc")) else None,
        )
        page.goto((tmp_path / "t.html").as_uri())
        return page

    yield opened
    context.close()
    assert not trouble


@pytest.fixture(scope="session")
def prediction():
    return predict("gpt3-1.3b", "dgx-a100", "tp=2,pp=4,dp=4,zero=1", global_batch=32, timeline=True)


@pytest.fixture(scope="session")
def bidirectional():
    return predict(
        "gpt3-1.3b",
        "dgx-a100",
        "tp=2,pp=4,dp=2,zero=1,schedule=chimera",
        global_batch=16,
        timeline=True,
    )

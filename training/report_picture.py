"""Draw the picture of README anew: the report page of GPT-3 175B on 1,024 A100s, as a browser shows
it.

    python training/report_picture.py

Needs Chromium and `pip install perfmodel[browser,viz]`.
"""

import shutil
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

import perfmodel as pm

PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "report.png"
WIDTH_PX, HEIGHT_PX = 1280, 970
COLOURS: Final = 96
"""As many keep the file below 100 kB, and nothing on the page looks different."""


def main() -> None:
    """Search, write the page, and keep its first screen."""
    page_file = Path("out") / "report.html"
    page_file.parent.mkdir(exist_ok=True)
    made = pm.report(
        "gpt3-175b", "dgx-a100", devices=1024, global_batch=1536, framework="megatron-core"
    )
    made.write(page_file)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX})
        page.goto(page_file.resolve().as_uri())
        # The page draws itself; before that it is empty.
        page.wait_for_function("window.perfmodelReport")
        page.screenshot(path=PICTURE)
        browser.close()
    # A palette, as the file is committed.
    Image.open(PICTURE).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        PICTURE, optimize=True
    )


if __name__ == "__main__":
    main()

"""The page of a report in a real browser, where there is one: on a phone and at a desk, in light and dark."""

from __future__ import annotations

import pytest

from diffpure.report.page import html
from diffpure.results.rows import CLEAN
from reports import PGD, hostile, pictures, reported


@pytest.fixture
def opened(browser, tmp_path):
    """What opens runs as a page, and the list of everything that the browser complained of."""
    problems: list[str] = []

    def open_(runs, width=1280, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(html(runs))
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: problems.append(message.text))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on(
            "request", lambda request: problems.append(request.url) if request.url[:5] not in ("file:", "data:") else 0
        )
        page.goto(file.as_uri())
        return page

    return open_, problems


def shown():
    """Two runs with pictures of five stages, a long name and three attacks."""
    stages = ("clean", "attacked", "diffused", "purified")
    attacks = dict.fromkeys(("pgd-ce", "apgd-ce", "apgd-dlr@bpda"), PGD)
    right = {CLEAN: 30, "pgd-ce": 10, "apgd-ce": 12, "apgd-dlr@bpda": 20}
    name = "A run with a name that is too long for one line of a phone, and a_word_that_has_no_place_to_break_anywhere"
    about = {"gallery": pictures(stages, images=8), "warnings": ["A warning."], "rules": ["one-shot", "worst of 1"]}
    return [reported(right, attacks, name=name, **about), reported(right, attacks, name="B", **about)]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_is_legible(opened, width, scheme):
    open_, problems = opened
    page = open_(shown(), width, scheme)
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert problems == []
    assert abs(_brightness(ink) - _brightness(paper)) > 120
    assert (_brightness(paper) < 80) == (scheme == "dark")


def test_a_click_enlarges_a_picture_and_another_closes_it(opened):
    open_, problems = opened
    page = open_(shown())
    picture = page.locator("#run-1-2-3 img")  # the second image, its perturbation
    before = picture.bounding_box()["width"]
    picture.click()
    assert picture.bounding_box()["width"] > 4 * before
    page.mouse.click(640, 450)  # anywhere
    assert picture.bounding_box()["width"] == before
    assert problems == []


def test_the_browser_runs_and_fetches_nothing_that_a_file_holds(opened):
    open_, problems = opened
    page = open_(hostile()[0])
    page.wait_for_timeout(300)
    assert problems == []
    assert page.locator("script, iframe, [onerror]").count() == 0


def _brightness(colour: str) -> float:
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3

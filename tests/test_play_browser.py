"""The playground in a real browser, where there is one: choose, attack, stop, slide, upload; on a phone and a desk."""

from __future__ import annotations

import re
import socket
import threading

import pytest
from PIL import Image

from test_play import bomb

BARE, ADAPTIVE = "Attack the undefended classifier", "Attack the defence (adaptive)"
PATIENCE = 60_000  # milliseconds, on a machine that is busy


@pytest.fixture(scope="module")
def address(browser):
    """The playground, served to this machine."""
    pytest.importorskip("gradio", reason="gradio is not installed")
    from diffpure.play.page import start
    from diffpure.play.session import Bench

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page, found = start(Bench(), "127.0.0.1", port)
    yield found
    page.close()


@pytest.fixture
def visit(browser, address):
    """What opens the playground, and the list of everything that the browser complained of or asked others for."""
    problems: list[str] = []

    def open_(width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        ours = (address, address.replace("http", "ws"), "data:", "blob:")
        page.on("request", lambda request: None if request.url.startswith(ours) else problems.append(request.url))
        page.goto(address)
        page.wait_for_selector("#panels figure")
        return page

    return open_, problems


def put(page, control, value):
    """Type a number into the field of a slider."""
    field = page.locator(f"#{control} input[type=number]")
    field.fill(str(value))
    field.press("Enter")
    field.blur()


def says(page, text):
    page.wait_for_function("text => document.querySelector('#panels').innerText.includes(text)", arg=text)


def test_choose_attack_stop_and_slide(visit):
    open_, problems = visit
    page = open_()
    put(page, "steps", 1)
    put(page, "iterations", 3)
    page.locator("#samples button").nth(5).click()
    says(page, ": dog.")
    page.get_by_role("button", name=BARE).click()
    says(
        page,
        "Attack on the undefended classifier: momentum PGD-3 on ce, budget ℓ∞ 8/255; the perturbation has ℓ∞ 8/255",
    )
    assert page.locator("#panels figure").count() == 6
    put(page, "t-star", 0.05)
    says(page, "Diffused to t* = 0.05")
    assert "dp.DDIM(t_star=0.05, steps=1)" in code(page, "Copy as Python", "python")
    assert 'classifier = "cifar10-resnet"' in code(page, "Copy as spec", "spec")

    put(page, "iterations", 100)
    page.get_by_role("button", name=ADAPTIVE).click()
    page.wait_for_selector("#status progress")
    assert re.search(r"step \d+ of 101, about .* left", page.locator("#status").inner_text())
    page.get_by_role("button", name="Stop").click()
    says(page, "Attack on the defence, through its exact gradient: momentum PGD-100 on ce")
    stopped = re.search(r"stopped after step (\d+) of 101", page.locator("#panels").inner_text())
    assert 1 <= int(stopped[1]) < 100
    page.wait_for_selector(f"button:has-text('{ADAPTIVE}'):enabled")
    assert page.locator("#status progress").count() == 0
    assert problems == []
    page.close()


def code(page, title, place):
    """The text of one of the two copies, which stand behind their titles."""
    page.get_by_role("button", name=title).click()
    page.wait_for_selector(f"#{place} .cm-content")
    return page.locator(f"#{place}").inner_text()


def test_bad_files_are_one_sentence_and_the_page_goes_on(visit, tmp_path):
    open_, problems = visit
    page = open_()
    (tmp_path / "text.png").write_text("just text")
    (tmp_path / "large.png").write_bytes(bomb())
    Image.new("RGB", (90, 60), "teal").save(tmp_path / "good.png")
    upload = page.locator("input[type=file]")
    for name, sentence in (
        ("text.png", "text.png is not an image that can be read; JPEG, PNG, WebP, BMP and TIFF are."),
        ("large.png", "large.png is too large; at most 64,000,000 pixels are accepted."),
    ):
        upload.set_input_files(tmp_path / name)
        page.wait_for_function("text => document.querySelector('#status').innerText.trim() == text", arg=sentence)
    upload.set_input_files(tmp_path / "good.png")
    says(page, "good.png: the square in the middle of 90×60 pixels, resized to 32×32")
    assert page.locator("#status").inner_text().strip() == ""
    assert problems == []
    page.close()


def test_the_page_fits_and_is_legible(visit):
    open_, problems = visit
    page = open_()
    says(page, "Not attacked yet.")  # whatever other visitors did
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"document.body.classList.contains('dark') == {str(scheme == 'dark').lower()}")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            shown = page.locator("#panels img").first
            assert shown.bounding_box()["width"] >= 130
            assert shown.evaluate("i => getComputedStyle(i).imageRendering") == "pixelated"
        ink = page.evaluate("getComputedStyle(document.querySelector('#panels p')).color")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert abs(brightness(ink) - brightness(paper)) > 120
        assert (brightness(paper) < 80) == (scheme == "dark")
    assert problems == []
    page.close()


def test_who_leaves_the_page_ends_the_attack(visit, monkeypatch):
    from diffpure.play import page as module

    steps, ended, whole = [], threading.Event(), module.attack_steps

    def watched(*arguments, **options):
        try:
            for scene in whole(*arguments, **options):
                steps.append(scene)
                yield scene
        finally:
            ended.set()

    monkeypatch.setattr(module, "attack_steps", watched)
    page = visit[0]()
    put(page, "iterations", 100)
    page.get_by_role("button", name=ADAPTIVE).click()
    page.wait_for_selector("#status progress")
    page.close()
    assert ended.wait(PATIENCE / 1000)
    assert len(steps) < 101


def brightness(colour: str) -> float:
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3

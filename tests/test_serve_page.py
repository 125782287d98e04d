"""The page of `pagoda serve` in a real browser: figures, a streaming chat, a ranking; desk, phone, light and dark."""

import re

import pytest
from browser import Browser
from capi import ROOT
from serving import LLAMA, Server

THREE = ROOT / "tests/data/engine/three"
# Slow enough that a browser sees its answer grow.
SMOLLM2 = ROOT / "target/models/smollm2"


@pytest.fixture(scope="module")
def server():
    with Server(f"smollm2={SMOLLM2}", f"movies={THREE}", "--provider", "cpu", "--host-cache", "64MiB") as server:
        yield server


PHONE = {"width": 390, "height": 844, "mobile": True, "dark": True}


@pytest.mark.parametrize(("name", "look"), [("desk", {}), ("phone", PHONE)])
def test_the_page_shows_what_is_served_and_asks_it(server, tmp_path, name, look):
    assert f"the page is {server.url}/" in server.line
    with Browser(tmp_path / "profile", **look) as browser:
        browser.open(server.url)
        browser.until("document.getElementById('ready').textContent === 'ready'")
        assert "smollm2" in browser.text("#models") and "pages used" in browser.text("#models")
        assert re.search(r"host memory: [\d.]+ \w+ of 64\.0 MiB used", browser.text("#models"))
        # A chat, word by word: the text grows.
        browser.run(
            "window.seen = new Set(); window.box = document.getElementById('talk');"
            "new MutationObserver(() => window.seen.add(box.innerText))"
            ".observe(box, {childList: true, subtree: true, characterData: true})"
        )
        browser.fill("chat-text", "Hello there")
        browser.fill("max-tokens", "60")
        browser.click("#send")
        browser.until("document.getElementById('send').textContent === 'Send' && talk.messages.length === 2")
        assert "Hello there" in browser.text("#talk p.mine")
        assert browser.text("#chat-note").split()[1] in ("tokens,", "tokens")
        assert browser.run("window.seen.size") > 2
        # A second turn of the same session uses what is cached.
        browser.fill("chat-text", "And again")
        browser.click("#send")
        browser.until("document.getElementById('send').textContent === 'Send' && talk.messages.length === 4")
        # A ranking.
        browser.click("#rank-form button")
        browser.until("document.querySelectorAll('#rank-answer table').length === 3")
        assert browser.run("document.querySelectorAll('#rank-answer tr').length") == 3 * 11
        # The figures follow.
        browser.until("Number(document.getElementById('count').textContent) >= 3")
        browser.until("state.seconds.some((second) => second.tokens > 0)")
        # What is wrong is said on the page.
        browser.run("[...document.querySelectorAll('#rank-candidates input')].forEach((input) => input.value = 'x')")
        browser.click("#rank-form button")
        browser.until("document.getElementById('rank-note').textContent.includes('x is not a whole number')")
        browser.screenshot(tmp_path / f"{name}.png")
        # Nothing is wider than the screen, nothing failed, and no other server was asked.
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert browser.errors == []
        assert all(url.startswith((server.url, "data:", "about:")) for url in browser.asked)


def test_a_text_of_the_model_is_no_markup(server, tmp_path):
    with Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.until("document.getElementById('ready').textContent === 'ready'")
        browser.run("say('<img src=x onerror=window.harm=1>')")
        assert browser.text("#talk p") == "<img src=x onerror=window.harm=1>"
        assert browser.run("document.querySelectorAll('#talk img').length") == 0


def test_the_page_asks_for_a_key(tmp_path):
    (tmp_path / "keys").write_text("sk-page\n")
    with Server(f"tiny={LLAMA}", "--keys-file", tmp_path / "keys") as server, Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.until("!document.getElementById('key-form').hidden")
        assert "tiny" not in browser.run("document.body.innerText")
        browser.fill("key", "sk-page")
        browser.click("#key-form button")
        browser.until("document.getElementById('ready').textContent === 'ready'")
        assert "tiny" in browser.text("#models") and browser.run("document.getElementById('key-form').hidden")
        server.stop()
        assert "sk-page" not in "".join(server.errors)

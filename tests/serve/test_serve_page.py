"""The page at `/`, and the fields of the API that it shows."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, Page, browser
from fastapi.testclient import TestClient
from live_server import LATE_S, gated, make_app, make_engine, serving

from dflash_toolkit import Drafter, Target
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.serve.page import FILES, FOLDER

NODE = shutil.which("node")
DONE = "!document.getElementById('send').hidden && document.querySelector('.answer')"
LINKS = "[...document.querySelectorAll('.answer .text a')].map((one) => one.href)"
ANSWER = {
    "drafting": True, "segments": [], "reasoning": "", "finish": "stop", "note": "", "error": "", "seconds": 0,
    "first": 0, "tokens": 9, "steps": 0, "committed": 0, "undrafted": 0, "lengths": [],
}  # fmt: skip
ASK: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 40, "ignore_eos": True,
    "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(target: Target, drafter: Drafter) -> AsyncEngine:
    return make_engine(target, drafter)


def chunks(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    lines = client.post("/v1/chat/completions", json=ASK | {"stream": True} | more).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("more", [{}, {"stop": ["never there"]}, {"max_tokens": 1}])
def test_steps_of_a_stream_hold_its_whole_text(engine: AsyncEngine, more: dict[str, Any]) -> None:
    client = TestClient(make_app(engine, "m"))
    plain = client.post("/v1/chat/completions", json=ASK | more).json()
    found = chunks(client, stream_options={"include_dflash": True, "include_usage": True}, **more)
    steps = [step for chunk in found for choice in chunk["choices"] for step in choice.get("dflash", ())]
    assert "".join("".join(step["text"]) for step in steps) == plain["choices"][0]["message"]["content"]
    usage = found[-1]["usage"]
    assert sum(step["tokens"] for step in steps) == usage["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert sum(step["accepted"] for step in steps) == usage["dflash"]["accepted"]
    assert sum(step["drafted"] for step in steps) == usage["dflash"]["drafted"]
    assert all(bool(step["text"][0]) <= bool(step["accepted"]) for step in steps)
    assert not any("dflash" in choice for chunk in chunks(client, **more) for choice in chunk["choices"])


def test_request_can_disable_the_drafter(engine: AsyncEngine) -> None:
    client = TestClient(make_app(engine, "m"))
    drafted = client.post("/v1/chat/completions", json=ASK).json()
    plain = client.post("/v1/chat/completions", json=ASK | {"speculative": {"num_speculative_tokens": 0}}).json()
    assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]
    assert drafted["usage"]["dflash"]["drafted"] > 0 == plain["usage"]["dflash"]["drafted"]
    refused = client.post("/v1/chat/completions", json=ASK | {"speculative": {"num_speculative_tokens": 3}})
    assert refused.status_code == 400 and "speculative.num_speculative_tokens" in refused.json()["error"]["message"]


def test_page_files_need_no_key_and_have_a_strict_policy(engine: AsyncEngine) -> None:
    with serving(engine, api_keys=["secret"]) as url:
        for path, (name, _) in FILES.items():
            reply = httpx.get(f"{url}{path}", timeout=LATE_S)
            policy = reply.headers["content-security-policy"]
            assert reply.status_code == 200 and reply.content == (FOLDER / name).read_bytes()
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            if "vendor" not in path:
                assert not re.search(r"https?://|//[a-z]+\.|innerHTML|insertAdjacentHTML|document\.write", reply.text)
    page = (FOLDER / "page.html").read_text()
    used = set(re.findall(r'\$\("([\w-]+)"\)', (FOLDER / "page.js").read_text()))
    assert used <= set(re.findall(r'id="([\w-]+)"', page)), "every element that the script looks for"
    assert set(re.findall(r'(?:href|src)="([\w./-]+)"', page)) <= {name for name, _ in FILES.values()}


def test_vendored_libraries_are_named_with_version_and_licence() -> None:
    notes, licences = ((FOLDER / "vendor" / name).read_text() for name in ("README.md", "LICENSES.txt"))
    for file in (FOLDER / "vendor").glob("*.js"):
        assert f"`{file.name}`" in notes
    for package, version in re.findall(r"==== (\S+) (\S+) ====", licences):
        assert f"{package} {version}" in notes.replace("DOMPurify", "dompurify")
    assert "DOMPurify 3.5.0" in (FOLDER / "vendor" / "purify.min.js").read_text()[:200]


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_page_javascript_tests_pass() -> None:
    run = subprocess.run(
        [str(NODE), "--test", str(Path(__file__).with_name("page.test.mjs"))], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def send(tab: Page, text: str, wait: bool = True) -> None:
    """Asks a question with the keyboard."""
    tab.run("document.getElementById('question').focus()")
    tab.type(text)
    tab.press("Enter")
    if wait:
        tab.wait(DONE)


def restore(tab: Page, *answers: str) -> None:
    """Loads the page again with a conversation that has these answers."""
    turns = [
        {"question": f"question {i}", "answers": [ANSWER | {"content": text, "segments": [["own", text]]}]}
        for i, text in enumerate(answers)
    ]
    tab.run("removeEventListener('pagehide', window.save)")
    tab.run(f"addEventListener('pagehide', () => sessionStorage.setItem('turns', {json.dumps(json.dumps(turns))}))")
    tab.run("sessionStorage.setItem('view', 'text')")
    tab.go(tab.run("location.href"))


@pytest.fixture(scope="module")
def page_engine(target: Target, drafter: Drafter) -> AsyncEngine:
    """A server closes its engine, so the page's server has its own."""
    return make_engine(target, drafter)


@pytest.fixture(scope="module")
def tab(page_engine: AsyncEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page on a server with a drafter. Nothing in it may break the policy or come from elsewhere."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with serving(page_engine) as url, browser(tmp_path_factory.mktemp("profile")) as page:
        page.size(1200, 700)
        page.go(url)
        yield page
        assert [one for one in page.console if not one.startswith("Failed to load")] == []  # a refused request is one
        assert page.urls and all(one.startswith((url, "data:")) for one in page.urls)


@pytest.fixture(autouse=True)
def new_chat(request: pytest.FixtureRequest) -> None:
    if "tab" in request.fixturenames:
        page = request.getfixturevalue("tab")
        page.run("sessionStorage.setItem('view', 'tokens')")
        page.run("document.querySelector('[name=view][value=tokens]').click()")
        page.run("if (document.getElementById('compare').checked) document.getElementById('compare').click()")
        page.click("#new")


def test_page_colours_drafted_and_own_tokens(tab: Page) -> None:
    assert tab.visible(".example") and tab.visible("#drafter") and tab.text("#model") == "org/tiny"
    send(tab, "Why?")
    shown = tab.run("document.querySelector('.answer .text').textContent")
    assert shown and tab.visible(".answer .wrong") and not tab.visible("#stop")
    assert float(tab.text("#tau")) >= 1
    assert tab.run("JSON.parse(sessionStorage.turns ?? '[]').length") == 1
    tab.go(tab.run("location.href"))
    assert tab.run("document.querySelector('.answer .text').textContent") == shown, "a reload keeps the conversation"


def test_page_shows_what_the_drafter_has_learned(tab: Page) -> None:
    assert not tab.visible("#learning"), "nothing is trained"
    state = {"training": {"error": None}, "summary": "drafter version 7, learnt from 1,840 requests"}
    tab.run(
        "const real = window.fetch; window.fetch = (path, more) => path.endsWith('v1/drafter') ? "
        f"Promise.resolve(new Response({json.dumps(json.dumps(state))})) : real(path, more); null"
    )
    tab.wait("document.getElementById('learning').checkVisibility()")
    assert tab.text("#learning") == state["summary"]
    tab.go(tab.run("location.href"))


def test_escape_stops_and_the_partial_answer_is_kept(tab: Page, page_engine: AsyncEngine) -> None:
    with gated(page_engine, turns=4) as gate:
        send(tab, "Count.", wait=False)
        gate.wait()
        tab.wait("/^[1-9]/.test(document.querySelector('.answer .note')?.textContent)")
        assert tab.visible("#stop") and not tab.visible("#send")
        tab.press("Escape")
        tab.wait(DONE)
    assert "stopped" in tab.text(".answer .foot")
    partial = tab.run("document.querySelector('.answer .text').textContent")
    send(tab, "continue")
    body = json.loads([one for one in tab.bodies if one][-1])
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][0]["content"] == "Count." and body["messages"][1]["content"] == partial


def test_error_returns_the_question_to_the_input(tab: Page) -> None:
    tab.run("document.getElementById('tokens').value = 1e6")
    send(tab, "Too long?")
    assert "1000000" in tab.text(".answer .error")
    assert tab.run("document.getElementById('question').value") == "Too long?"
    tab.run("document.getElementById('tokens').value = 20")
    tab.press("Enter")
    tab.wait(DONE)
    assert tab.run("document.querySelectorAll('.user').length") == 1, "asking again replaces the failed answer"
    assert not tab.visible(".error") and tab.visible(".cut"), "20 tokens are the limit"


def test_editing_and_regenerating_replace_an_answer(tab: Page) -> None:
    send(tab, "one")
    send(tab, "two")
    tab.run("[...document.querySelectorAll('.foot button')].find((one) => one.innerText === 'Regenerate').click()")
    tab.wait(DONE)
    assert tab.run("[...document.querySelectorAll('.said')].map((one) => one.textContent)") == ["one", "two"]
    tab.click(".user button")
    assert tab.run("document.getElementById('question').value") == "one" and tab.visible("#editing")
    send(tab, " and a half")
    assert tab.run("[...document.querySelectorAll('.said')].map((one) => one.textContent)") == ["one and a half"]


def test_compare_sends_two_requests_and_next_answer_clears_it(tab: Page) -> None:
    tab.click("#compare")
    send(tab, "Why?")
    assert tab.run("document.querySelectorAll('.answer').length") == 2
    texts = tab.run("[...document.querySelectorAll('.answer .text')].map((one) => one.textContent)")
    assert texts[0] == texts[1] and texts[0]
    tab.click("#compare")
    send(tab, "And now?")
    assert tab.text("#ratio") == "" and not re.search(r"\d", tab.text("#plain"))


BAD = "script, img, svg, iframe, style, form, b, [onclick], [onload], [onerror], [onmouseover], [style]"
HOSTILE = """<script>window.hurt = 1</script> <img src=x onerror="window.hurt = 2"> <svg onload="window.hurt = 3"></svg>

[click](javascript:window.hurt=4) [data](data:text/html,<script>alert(1)</script>) ![far](https://example.org/x.png)

<a href="javascript:window.hurt=5">raw</a> <iframe src="https://example.org"></iframe>


[quoted](https://example.org/"onmouseover="window.hurt=6) <javascript:window.hurt=7> &lt;script&gt;

| <b onclick="window.hurt = 8">t</b> |
|---|
| `<script>window.hurt = 9</script>` |

```html"onload="window.hurt=10
<script>window.hurt = 11</script>
```
"""


def test_model_text_cannot_run_scripts(tab: Page) -> None:
    restore(tab, HOSTILE)
    assert tab.text(".answer pre").startswith("<script>window.hurt = 11")
    assert tab.run(f"document.querySelectorAll('.answer .text :is({BAD})').length") == 0
    assert all(link.startswith("https://example.org/") for link in tab.run(LINKS))
    tab.run("document.querySelectorAll('.answer .text :not(a, button)').forEach((one) => one.click())")
    assert tab.run("window.hurt ?? 0") == 0
    tab.click("[name=view][value=tokens]")
    assert tab.run(f"document.querySelectorAll('.answer .text :is({BAD})').length") == 0
    assert tab.run("window.hurt ?? 0") == 0


def test_sanitizer_alone_removes_scripts(tab: Page) -> None:
    """The Markdown parser escapes HTML; this is what happens if it ever lets some through."""
    tab.run(
        "import('/markdown.js').then(({ clean }) => document.getElementById('chat').replaceChildren(clean("
        f"{json.dumps(HOSTILE)})))"
    )
    tab.console.clear()  # Chromium reports each handler that the policy blocks
    assert "raw" in tab.run("document.getElementById('chat').textContent")
    assert tab.run(f"document.querySelectorAll('#chat :is({BAD})').length") == 0
    assert tab.run("[...document.querySelectorAll('#chat a')].every((one) => !/script/.test(one.href))")
    assert tab.run("window.hurt ?? 0") == 0


def test_markdown_has_code_blocks_that_can_be_copied(tab: Page) -> None:
    restore(tab, "# Title\n\nSome **bold** text.\n\n```python\ndef f():\n    return 1\n```\n")
    assert tab.text(".answer strong") == "bold" and tab.visible(".answer h1")
    assert "mono" in tab.run("getComputedStyle(document.querySelector('.answer pre code')).fontFamily").lower()
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    tab.click(".code button")
    tab.wait("window.copied")
    assert tab.run("window.copied") == "def f():\n    return 1\n"


def test_new_text_does_not_scroll_a_page_scrolled_up(tab: Page, page_engine: AsyncEngine) -> None:
    top = "document.getElementById('chat').scrollTop"
    try:
        tab.size(1200, 400)
        restore(tab, *["x\n\n" * 12] * 2)
        tab.wait(f"{top} > 300")
        with gated(page_engine, turns=2) as gate:
            send(tab, "More?", wait=False)
            gate.wait()
            tab.wait("/[1-9]/.test(document.querySelector('.turn:last-child .note').textContent)")
            tab.run(f"{top} = 100")
            tab.wait("document.getElementById('down').checkVisibility()")
            before = tab.text(".turn:last-child .note")
            gate.wait(3)
            tab.wait(f"document.querySelector('.turn:last-child .note').textContent !== {json.dumps(before)}")
            assert tab.run(top) == 100
        tab.wait(DONE)
        assert tab.run(top) == 100
        tab.click("#down")
        tab.wait("document.getElementById('down').hidden")
        assert tab.run(top) > 300
    finally:
        tab.size(1200, 700)


def test_page_on_a_phone_pins_the_input_and_scrolls_the_chat(tab: Page) -> None:
    try:
        tab.size(390, 780)
        restore(tab, "a paragraph\n\n" * 60)
        assert tab.run("document.documentElement.scrollWidth <= 390 && scrollY === 0")
        assert tab.run("document.getElementById('chat').scrollHeight > document.getElementById('chat').clientHeight")
        assert tab.run("document.getElementById('send').getBoundingClientRect().bottom <= 780")
        top = "document.getElementById('{}').getBoundingClientRect().top"
        assert tab.run(f"Math.abs({top.format('new')} - {top.format('figures')}) < 4"), "one line of buttons"
        assert not tab.visible("#side")
        tab.click("#figures")
        assert tab.visible("#tau")
        tab.press("Escape")
        assert not tab.visible("#side")
    finally:
        tab.size(1200, 700)


def test_all_controls_work_with_the_keyboard(tab: Page) -> None:
    tab.run("document.activeElement.blur()")
    tab.run("getSelection().removeAllRanges()")
    tab.go(tab.run("location.href"))
    tab.run("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        tab.press("Tab")
        reached.append(
            tab.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
    assert {"theme", "new", "chat", "example", "question", "drafter", "compare", "send", "SUMMARY", "skip"} <= set(
        reached
    )


def test_page_hides_draft_figures_without_a_drafter(target: Target, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with serving(make_engine(target, None)) as url, browser(tmp_path) as page:
        page.go(url)
        assert not any(
            page.visible(one) for one in ("#drafter", "#compare", ".legend", "#tau", "#ratio", "[name=view]")
        )
        send(page, "Why?")
        assert page.visible(".answer .text") and "step" not in page.text(".answer .foot")
        assert "speculative" not in page.text("body") and page.console == []


def test_page_shows_lost_and_restored_connection(target: Target, drafter: Drafter, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with browser(tmp_path) as page:
        with serving(make_engine(target, drafter)) as url:
            page.go(url)
            send(page, "Why?")
            assert not page.visible("#gone")
        page.wait("document.getElementById('gone').checkVisibility()")
        assert float(page.run("getComputedStyle(document.getElementById('side')).opacity")) < 1
        send(page, "Still there?")
        assert page.text(".turn:last-child .error") == "The server cannot be reached."
        with serving(make_engine(target, drafter), port=int(url.rsplit(":", 1)[1])):
            page.wait("!document.getElementById('gone').checkVisibility()")
            page.press("Enter")  # the question is in the box again
            page.wait(DONE)
            assert page.run("document.querySelectorAll('.user').length") == 2 and not page.visible(".error")

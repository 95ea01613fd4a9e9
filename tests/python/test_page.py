"""The page of an agent, in real headless Chromium, against real agents. Pictures of it are left in target/page."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from .browser import Page, found
from .page_agents import BUILT, MANY, ROOT, Agents

REQUIRED = "TOWLINE_TEST_REQUIRE_SERVERS" in os.environ
PICTURES = ROOT / "target/page"

pytestmark = [
    pytest.mark.skipif(not REQUIRED and not BUILT.exists(), reason=f"{BUILT} is not there: cargo build makes it"),
    pytest.mark.skipif(
        not REQUIRED and found() is None, reason="Chromium is not there: tests/servers/setup.sh installs it"
    ),
]

# Texts of each view, by what the agents of the tests hold.
VIEWS = {
    "overview": ["alpha/tune/step-5", "done", "alpha/tune", "home (repository)", "us-east-1", "ready"],
    "sites": ["64 H100 at $1.10/h", "aws, us-east-1, US", "alpha/tune/step-5", "119.2 MiB/s", "20.0 ms", "$0.05"],
    "transfers": ["alpha/tune/step-5", "warm", "done", "towline://cloud/agent"],
    "cache": ["there of", "Damaged, dropped", "alpha/tune/step-5"],
    "runs": ["alpha/tune", "raw/notes", "10 to 30", "Choose a run."],
    "hints": ["Name the inputs of a job", "No hint is committed here"],
    "usage": ["Total", "team-a"],
    "audit": ["allow", "warm", "user of the socket", "alpha/tune/step-5"],
}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Agents of two sites."""
    agents = Agents(tmp_path_factory.mktemp("page"))
    yield agents
    agents.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """One browser for all tests."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with Page() as page:
        yield page


@contextmanager
def opened(browser: Page, url: str, complaints: bool = False) -> Iterator[Page]:
    """The page at a URL, in a tab without a token of before; afterwards, nothing was complained about."""
    browser.open("about:blank")
    origin = url.split("#")[0]
    browser.call("Storage.clearDataForOrigin", origin=origin.rstrip("/"), storageTypes="all")
    browser.open(origin + "page/icon.svg")
    browser.run("sessionStorage.clear()")
    browser.events.clear()
    browser.open(url)
    yield browser
    assert complaints or not browser.complaints()


def own(agents: Agents, view: str = "overview") -> str:
    """URL of a view of the agent at home, with its token."""
    return f"http://127.0.0.1:{agents.http}/#token={agents.token()}" if view == "overview" else view


def loaded(page: Page, view: str) -> None:
    """Goes to a view, and waits until it has loaded."""
    page.run(f"location.hash = '{view}'")
    page.until("!document.body.innerText.includes('Loading...')")


def test_each_view_shows_what_the_agents_have_and_asks_nobody_else(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        for view, expected in VIEWS.items():
            loaded(page, view)
            for text in expected:
                page.until(f"document.body.innerText.includes({json.dumps(text)})")
            for name, (width, height, scheme) in {
                "light": (1280, 900, "light"),
                "dark": (1280, 900, "dark"),
                "narrow": (400, 900, "light"),
            }.items():
                page.resize(width, height)
                page.prefer(color_scheme=scheme)
                # Wide tables scroll in themselves.
                assert page.run("document.documentElement.scrollWidth <= innerWidth"), f"{view} {name} is too wide"
                page.picture(PICTURES / f"{view}-{name}.png")
            page.resize(1280, 900)
            assert page.run("document.querySelectorAll('.failure').length") == 0, page.text()
        assert page.run("document.title") == "Audit - Towline"
        # Chromium draws its own controls with pictures of its own.
        asked = {urlsplit(url).netloc for url in page.requests() if not url.startswith("data:")}
        assert asked == {f"127.0.0.1:{agents.http}"}


def test_a_run_is_opened_down_to_how_a_step_is_stored(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        loaded(page, "runs")
        page.until("document.querySelector('[data-key=run]')")
        page.run("document.querySelector('[data-key=run]').click()")
        page.until("document.querySelector('[data-key=\"run/step-20\"]')")
        page.run("document.querySelector('[data-key=\"run/step-20\"]').click()")
        page.until("document.body.innerText.includes('Share of the stored bytes')")
        stored = agents.json("show", "run/step-20", "--repo", agents.place)
        assert "4.0 MiB in 1 file" in page.text() and stored["bytes"] == 4 << 20
        assert page.run("location.hash") == "#runs?run=run&tree=run%2Fstep-20"
        page.picture(PICTURES / "runs-step.png")
        # A reload, or a link, shows the same.
        page.open(f"http://127.0.0.1:{agents.http}/#runs?run=run&tree=run%2Fstep-20")
        page.call("Page.reload")
        page.until("document.body.innerText.includes('Share of the stored bytes')")


def test_a_hint_is_explained_term_by_term(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        loaded(page, "hints")
        ask = "document.querySelector('input[list]').value = {}; document.querySelector('form.tools button').click()"
        page.run(ask.format("'run@latest'"))
        page.until("document.querySelectorAll('.candidate').length === 2")
        hint = agents.json("hint", "run@latest", "--repo", agents.place, "--gpus", "8", agent="home")
        first = page.run("document.querySelector('.candidate h3').textContent")
        assert first == f"1. {hint['candidates'][0]['site']}"
        for term in (
            "There already",
            "Missing",
            "In 9 of 10 cases (p90)",
            "Egress",
            "Idle GPUs while waiting",
            "Prices",
        ):
            assert term in page.text(), term
        page.picture(PICTURES / "hints-explained.png")
        page.run(ask.format("'raw/notes@latest'"))
        page.until("document.body.innerText.includes('raw data stays at home')")
        # An error is told where it was caused, with what to do.
        page.run(ask.format("'absent'"))
        page.until("document.querySelector('.failure')")
        assert "absent" in page.run("document.querySelector('.failure').textContent")
        page.events.clear()


def test_what_is_committed_and_denied_is_seen_where_it_is(agents: Agents, browser: Page) -> None:
    http, _, _ = agents.ports["cloud"]
    with opened(browser, f"http://127.0.0.1:{http}/#token={agents.token('cloud')}", complaints=True) as page:
        loaded(page, "runs?run=raw%2Fnotes&tree=raw%2Fnotes%2Fstep-1")
        page.until("document.querySelector('.failure')?.textContent.includes('raw data stays at home')")
        loaded(page, "hints")
        page.until("document.body.innerText.includes('run/step-30')")
        assert "home/agent/agent" in page.text() and "ready" in page.text()
        loaded(page, "audit")
        page.until("document.body.innerText.includes('deny')")
        page.run("document.querySelector('input[type=checkbox]').click()")
        page.until("document.querySelector('.mark.bad') && !document.querySelector('.mark.good')")
        assert "raw data stays at home" in page.text()


def test_keys_reach_everything(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        page.until("document.querySelector('#agent').dataset.state === 'ready'")
        page.press("Tab")
        assert page.run("document.activeElement.className") == "skip"
        page.press("3")
        page.until("location.hash === '#transfers'")
        page.until("document.querySelector('.virtual tbody th')")
        page.press("/")
        assert page.run("document.activeElement.type") == "search"
        # Keys that are typed into a field choose no view.
        page.type("3")
        page.press("5")
        assert page.run("location.hash") == "#transfers"
        page.run("document.activeElement.blur()")
        page.press("?")
        page.until("document.querySelector('#keys').open")
        page.press("8")
        assert page.run("location.hash") == "#transfers"
        page.run("document.querySelector('#keys button').click()")
        page.press("8")
        page.until("location.hash === '#audit'")
        # Names of controls, for those who hear the page.
        unnamed = (
            "[...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter((each) => !each.ariaLabel"
        )
        unnamed += " && !each.textContent.trim() && !each.labels?.length).map((each) => each.outerHTML)"
        assert page.run(unnamed) == []


def test_a_token_is_asked_for_and_never_in_the_address(agents: Agents, browser: Page) -> None:
    with opened(browser, f"http://127.0.0.1:{agents.http}/", complaints=True) as page:
        page.until("document.querySelector('#sign-in').open")
        assert "needs a token" in page.text() and "alpha" not in page.text()
        sign_in = "document.querySelector('#token').value = '{}'; document.querySelector('#sign-in button').click()"
        page.run(sign_in.format("wrong"))
        page.until(
            "document.querySelector('#sign-in').open && document.body.innerText.includes('The token is not valid')"
        )
        page.run(sign_in.format(agents.token()))
        page.until("document.body.innerText.includes('alpha/tune')")
        page.open(own(agents))
        page.until("document.body.innerText.includes('alpha/tune')")
        assert page.run("location.href") == f"http://127.0.0.1:{agents.http}/"
        assert not any(agents.token() in url for url in page.requests())
        assert page.run("localStorage.length") == 0


def test_a_token_with_few_scopes_shows_what_it_may(agents: Agents, browser: Page) -> None:
    words = ["token", "new", "--scope", "metrics", "--scope", "read=alpha/**", "--name", "viewer"]
    secret = agents.json(*words, agent="home")["secret"]
    with opened(browser, f"http://127.0.0.1:{agents.http}/#token={secret}", complaints=True) as page:
        loaded(page, "runs")
        page.until("document.body.innerText.includes('alpha/tune')")
        assert "raw/notes" not in page.text() and "10 to 30" not in page.text()
        loaded(page, "sites")
        page.until("document.body.innerText.includes('us-east-1')")
        loaded(page, "audit")
        page.until("document.querySelector('.failure')")
        assert "token lacks the scope" in page.text()


def test_an_agent_that_starts_again_has_another_token(agents: Agents, browser: Page) -> None:
    http, _, _ = agents.ports["cloud"]
    with opened(browser, f"http://127.0.0.1:{http}/#token={agents.token('cloud')}", complaints=True) as page:
        page.until("document.body.innerText.includes('alpha/tune')")
        agents.stop("cloud")
        page.until("document.querySelector('.stale') && document.body.innerText.includes('does not answer')")
        assert "alpha/tune" in page.text(), "what was known stays, and is marked"
        agents.start("cloud")
        page.until(
            "document.querySelector('#sign-in').open && document.body.innerText.includes('The token is not valid')"
        )


def test_the_page_over_the_socket_lives_on_with_the_agent(agents: Agents, browser: Page) -> None:
    served = agents.page("cloud")
    url = json.loads(served.stdout.readline())["url"]
    with opened(browser, url, complaints=True) as page:
        page.until("document.body.innerText.includes('alpha/tune')")
        agents.stop("cloud")
        page.until("document.querySelector('#agent').dataset.state === 'no answer'")
        agents.start("cloud")
        page.until("document.querySelector('#agent').dataset.state === 'ready' && !document.querySelector('.stale')")
        loaded(page, "hints")
        page.run("document.querySelector('input[list]').value = 'alpha/tune@latest'")
        page.run("document.querySelector('form.tools button').click()")
        page.until("document.querySelectorAll('.candidate').length === 2")
    port = url.split(":")[2].split("/")[0]
    taken = agents.page("cloud", "--port", port)
    _, error = taken.communicate(timeout=60)
    assert taken.returncode != 0 and f"127.0.0.1:{port}" in error
    served.send_signal(signal.SIGINT)
    assert served.wait(30) == 0
    again = agents.page("cloud", "--port", port)
    assert url.split("#")[0] in json.loads(again.stdout.readline())["url"]
    again.terminate()
    assert again.wait(30) == 0


def test_nobody_but_the_page_is_answered(agents: Agents) -> None:
    served = agents.page("home")
    address, token = json.loads(served.stdout.readline())["url"].split("#token=")

    def answered(path: str, **headers: str) -> int:
        method = headers.pop("method", "GET")
        headers = {name.capitalize(): value for name, value in headers.items()}
        request = urllib.request.Request(address + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    bearer = f"Bearer {token}"
    assert answered("") == 200 and answered("page/main.js") == 200
    assert answered("v1/pins") == 401 and answered("v1/pins", authorization="Bearer wrong") == 401
    assert answered("v1/pins", authorization=bearer) == 200
    assert answered("v1/pins", authorization=bearer, host="rebound.example") == 403
    assert answered("", host="rebound.example") == 403
    assert answered("v1/warm", authorization=bearer, method="POST") == 403
    assert answered("v1/pins/any", authorization=bearer, method="DELETE") == 403
    assert answered("v1/none", authorization=bearer) == 404
    served.terminate()
    assert served.wait(30) == 0


def test_one_run_that_may_not_come_here_hides_no_other(agents: Agents, browser: Page) -> None:
    http, _, _ = agents.ports["cloud"]
    with opened(browser, f"http://127.0.0.1:{http}/#token={agents.token('cloud')}", complaints=True) as page:
        loaded(page, "sites")
        page.until("document.body.innerText.includes('raw data stays at home')")
        for text in ("alpha/tune/step-5", "run/step-30", "100 %"):
            page.until(f"document.body.innerText.includes('{text}')")


def test_a_refresh_keeps_place_focus_and_what_is_selected(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        page.resize(360, 700)
        loaded(page, "audit")
        page.until("document.querySelector('.scroll')")
        page.run("window.first = document.querySelector('.scroll')")
        page.run("first.scrollLeft = 60; first.focus()")
        # Further entries, until the table is drawn again.
        agents.run("warm", "run@latest", "--wait", agent="home")
        page.until("document.querySelector('.scroll') !== first")
        assert page.run("document.querySelector('.scroll').scrollLeft") == 60
        assert page.run("document.activeElement === document.querySelector('.scroll')")
        page.resize(1280, 900)
        loaded(page, "cache")
        page.until("document.querySelector('code')")
        page.run("getSelection().selectAllChildren(document.querySelector('.stack code'))")
        selected = page.run("getSelection().toString()")
        agents.run("pin", "run/step-10", "--for", "1h", agent="home")
        # Both panels have been loaded again by then.
        page.run("new Promise((resolve) => setTimeout(resolve, 6000))")
        assert selected and page.run("getSelection().toString()") == selected
        page.run("getSelection().removeAllRanges()")
        page.until("document.body.innerText.includes('run/step-10')")


def test_the_skip_link_stays_in_the_view(agents: Agents, browser: Page) -> None:
    with opened(browser, own(agents)) as page:
        loaded(page, "usage")
        page.run("document.querySelector('.skip').click()")
        assert page.run("location.hash") == "#usage"
        assert page.run("document.activeElement.id") == "content"


def test_an_agent_without_parts_says_what_would_add_them(agents: Agents, browser: Page) -> None:
    folder = agents.folder / "bare"
    folder.mkdir()
    (folder / "agent.toml").write_text(
        f'repositories = ["{agents.place}"]\nsocket = "{folder}/agent.sock"\nmemory = "256M"\n'
    )
    agents.launch("bare", folder)
    served = agents.page("bare")
    url = json.loads(served.stdout.readline())["url"]
    with opened(browser, url, complaints=True) as page:
        page.until("document.body.innerText.includes('[advisor] sites')")
        loaded(page, "transfers")
        page.until("document.body.innerText.includes('knows no others')")
        for view, text in {"cache": "this agent has no cache", "audit": "this agent has no audit log"}.items():
            loaded(page, view)
            page.until(f"document.body.innerText.includes('{text}')")
    # Whoever reads its output has gone.
    served.stdout.close()
    assert served.wait(30) == 0
    agents.stop("bare")


def test_a_name_of_another_site_reads_nothing_over_a_forwarded_socket(agents: Agents) -> None:
    def asked(host: str) -> int:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(agents.socket("home")))
            line.sendall(f"GET /v1/pins HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            return int(line.makefile("rb").readline().split()[1])

    assert [asked(host) for host in ("localhost", "127.0.0.1:7170", "agent")] == [200, 200, 200]
    assert [asked(host) for host in ("evil.example", "evil.example:8000", "169.254.169.254")] == [403, 403, 403]


def test_texts_of_others_stay_texts(agents: Agents, browser: Page) -> None:
    hostile = "<img src=x onerror=alert(1)>`code`\u202enimda"
    agents.run("pin", "alpha/tune@latest", "--owner", hostile, "--for", "1h", agent="home")
    with opened(browser, own(agents)) as page:
        loaded(page, "cache")
        page.until("document.body.innerText.includes('onerror=alert(1)')")
        assert page.run("document.querySelectorAll('#content img').length") == 0
        # Nor does it read as something else.
        assert "\\u{202e}nimda" in page.text()
        # Even what would be put into the page is not run.
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            page.run("document.body.innerHTML = '<img src=x>'")
        page.events.clear()


def test_files_of_the_page_say_what_a_browser_may_do(agents: Agents) -> None:
    for path in ("", "page/main.js", "page/page.css", "page/icon.svg"):
        with urllib.request.urlopen(f"http://127.0.0.1:{agents.http}/{path}", timeout=30) as response:
            headers = response.headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_ten_thousand_transfers_are_followed(agents: Agents, browser: Page) -> None:
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=MANY)
    try:
        with opened(browser, own(agents)) as page:
            loaded(page, "transfers")
            page.until("document.body.innerText.includes('10,000 of 10,000')")
            assert page.run("document.querySelectorAll('.virtual tbody th').length") < 100
            # The rows show the latest answer, though each takes a while.
            page.until(
                "asked > 4 && document.querySelector('.virtual tbody td:nth-of-type(2)').textContent === `look ${asked}`"
            )
            scroll = "document.querySelector('.virtual').scrollTop = {}"
            page.run(scroll.format("1e9"))
            page.until("document.querySelector('.virtual tbody tr[aria-rowindex=\"10001\"]')")
            page.until("document.querySelector('.virtual tbody').nextElementSibling.lastElementChild.offsetTop > 3e5")
            page.run(scroll.format("0"))
            search = "Object.assign(document.querySelector('input[type=search]'), {value: 'step-9999'})"
            page.run(f"{search}.dispatchEvent(new Event('input'))")
            page.until("document.body.innerText.includes('1 of 10,000')")
            page.until("document.querySelectorAll('.virtual tbody th').length === 1")
            assert "run-8/step-9999" in page.text() and "KiB/s" in page.text()
            page.picture(PICTURES / "transfers-many.png")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])

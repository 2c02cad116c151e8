"""The dashboard's page in a real Chromium, on pipelines that are made up (`fake_api.py`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, get_args
from urllib.parse import quote

import pytest

from tests.dashboard.browser import Browser
from tests.dashboard.fake_answers import SAYS
from tests.dashboard.fake_api import TOKEN, Server, serving
from tests.dashboard.fake_pipelines import HTML_NAME, FakePipeline, World
from tidegate.dashboard.values import Phase
from tidegate.engine.events import Rewound, SavepointTaken
from tidegate.engine.status import as_moment

pytestmark = pytest.mark.slow

PHONE, DESKTOP = 360, 1280
NONE = "\N{EN DASH}"
EACH = ["", "/checkpoints", "/checkpoints/ckpt-000010", "/compare/ckpt-000009/ckpt-000010"]
EACH += ["/tables", "/history", "/history?kinds=", "/settings", "/actions"]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(World()) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The browser, before it has opened anything. What it was told on the console fails the test."""
    browser.errors.clear()
    browser.requests.clear()
    browser.size(DESKTOP)
    browser.prefer("light")
    yield browser
    browser.open("about:blank")
    own = (server.url + "/", "about:", "data:")
    assert [each for each in browser.requests if not each.startswith(own)] == []
    assert browser.errors == []


def path_of(pipeline: FakePipeline, rest: str = "") -> str:
    return f"#/p/{quote(pipeline.key)}{rest}"


def open_page(page: Browser, server: Server, path: str) -> None:
    page.open("about:blank")
    page.open(f"{server.url}/{path}")
    is_at(page, path)


def go(page: Browser, path: str) -> None:
    """To another page of the one that is open."""
    page.see(f"location.hash = {json.dumps(path)}")
    is_at(page, path)


def wait_for(is_so: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_at(page: Browser, path: str) -> None:
    """Until it is drawn."""
    page.wait(f"document.getElementById('main').dataset.shows === {json.dumps(path)}")


def test_the_worst_pipelines_come_first_and_each_says_why(page: Browser, server: Server) -> None:
    open_page(page, server, "#/")
    rows = page.see("[...document.querySelectorAll('main tbody tr')].map(row => row.innerText)")
    names = [row.split("\n")[0].strip() for row in rows]
    assert names == ["payments", "fleet <b>north</b>", "clicks", "visits", "orders"]
    assert "killed" in rows[0]
    assert f"ckpt-000041 is under way, waiting for {HTML_NAME} (and 3 more)" in rows[1]
    assert "The run restarts: stage clean: Connection reset by peer" in rows[2]
    assert "Healthy" in rows[4]
    page.click_text("orders")
    page.wait_text("Nothing is late", "#strip")


@pytest.mark.parametrize("name", ["orders", "fleet <b>north</b>", "payments", "clicks", "visits"])
def test_every_page_opens_at_both_widths_without_scrolling_sideways(page: Browser, server: Server, name: str) -> None:
    pipeline = server.world.named(name)
    paths = EACH if pipeline.past else [each for each in EACH if "ckpt" not in each]
    open_page(page, server, "#/")
    for path in ["#/", *(path_of(pipeline, each) for each in paths)]:
        go(page, path)
        assert page.see("document.querySelector('.problem')?.innerText ?? ''") == "", path
        assert page.see("document.querySelectorAll('h1').length") == 1, path
        for width in (DESKTOP, PHONE):
            page.size(width)
            page.see("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            assert page.see("document.documentElement.scrollWidth") <= width, path


def test_names_with_html_are_text(page: Browser, server: Server) -> None:
    fleet = server.world.named("fleet <b>north</b>")
    open_page(page, server, "#/")
    for path in ["#/", *(path_of(fleet, each) for each in EACH[:6])]:
        go(page, path)
        assert page.see("document.querySelectorAll('main img, main b, #strip img, #strip b, #crumbs b').length") == 0
    open_page(page, server, path_of(fleet, "/tables"))
    assert HTML_NAME in page.text("main")
    assert "fleet <b>north</b>" in page.text("#crumbs")


def test_the_drawing_shows_stages_the_barrier_and_who_is_held_back(page: Browser, server: Server) -> None:
    orders, fleet = server.world.named("orders"), server.world.named("fleet <b>north</b>")
    server.world.advance(3)
    open_page(page, server, path_of(orders))
    page.wait("document.querySelectorAll('.graph .node').length === 7")
    page.wait("document.querySelectorAll('.graph .edge').length === 6")
    page.wait("document.querySelectorAll('.barrier:not(.is-away)').length > 0")
    page.wait_text("ckpt-000061", "main")
    open_page(page, server, path_of(fleet))
    page.wait("document.querySelectorAll('.graph .node').length === 100")
    page.wait("document.querySelectorAll('.edge.is-held').length > 0")
    page.wait_text(f"is held back by {HTML_NAME}", "#strip")
    page.wait_text("Kafka's brokers do not answer", "#strip")


def test_the_barrier_is_seen_on_its_way_into_stages_that_run_as_one_query(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    orders.chains = {"order_log": ("large",)}
    server.world.advance(4)
    open_page(page, server, path_of(orders))
    told = "[...document.querySelectorAll('.edge title')].map(title => title.textContent)"
    page.wait(f"{told}.some(text => text.startsWith('orders to large') && text.includes('the barrier is here'))")
    assert page.see(f"{told}.find(text => text.startsWith('large to order_log'))").count("barrier") == 0
    server.world.advance(2)
    page.wait("document.querySelectorAll('.edge.is-chained.is-passed').length === 1")


def test_what_is_yet_to_be_read_stands_at_the_channel_that_it_comes_by(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    of_both = next(name for name, (_, inputs) in orders.shape.items() if len(inputs) > 1)
    while not all((lags := orders.status().stages[of_both].lags).values()) or len(set(lags.values())) == 1:
        server.world.advance()
    open_page(page, server, path_of(orders))
    for source, lag in lags.items():
        said = f"{source} to {of_both}: "
        title = f"[...document.querySelectorAll('.edge title')].find(e => e.textContent.startsWith({json.dumps(said)}))"
        assert f"{lag} segment" in page.wait(f"{title}?.textContent")
    words = page.wait("[...document.querySelectorAll('.flow')].map(e => e.textContent)")
    assert {f"lag {lag}" for lag in lags.values()} <= {each.partition(" · ")[2] for each in words}


def test_a_change_arrives_without_reload(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders, "/checkpoints"))
    page.see("window.isTheSame = true")
    assert "ckpt-000061" not in page.text("main")
    orders.finish(is_aborted=True)
    server.world.tell()
    page.wait_text("ckpt-000061", "main table")
    page.wait_text("ckpt-000061 was aborted", "#announcer")
    orders.life, orders.state = "stopped", "failed"
    server.world.tell()
    page.wait_text("Failed", "#strip")
    assert page.see("window.isTheSame")


def test_the_list_of_pipelines_is_live_too(page: Browser, server: Server) -> None:
    open_page(page, server, "#/")
    page.wait_text("Live", "#connection")
    server.world.named("orders").finish()
    server.world.tell()
    page.wait_text("ckpt-000061", "main")


def test_a_lost_connection_is_told_and_comes_back(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders))
    page.wait_text("Live", "#connection")
    server.world.is_down = True
    server.world.tell()
    page.wait_text("The connection was lost", "#lost")
    page.wait_text("Not live", "#connection")
    server.world.is_down = False
    page.wait("document.getElementById('lost').hidden")
    assert {each.split(" http")[0] for each in page.errors} <= {
        "Failed to load resource: the server responded with a status of 503 (Service Unavailable)"
    }
    page.errors.clear()


def test_checkpoints_are_filtered_and_paged(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders, "/checkpoints"))
    states = "[...document.querySelectorAll('main table.stacks tbody tr')].map(row => row.cells[1].innerText.trim())"
    assert len(page.see(states)) == 25
    page.click_text("Older")
    page.wait_text("ckpt-000030", "main table.stacks")
    page.click_text("Newer")
    page.wait_text("ckpt-000060", "main table.stacks")
    page.click_text("Aborted")
    page.wait(f"{states}.every(state => state === 'Aborted')")
    assert page.see(states) == ["Aborted"] * 3
    assert page.see("document.querySelector('.choices [aria-current]').innerText") == "Aborted"
    assert "took part too late" in page.text("main table.stacks")
    page.click_text("Damaged")
    page.wait_text("None of this kind", "main")


def test_plots_are_read_by_keys_and_as_a_table(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders, "/checkpoints"))
    assert page.see("[...document.querySelectorAll('.plot h3')].map(e => e.innerText)") == [
        "Duration",
        "Size",
        "State per stage",
        "In flight",
    ]
    page.wait("document.querySelectorAll('.drawing svg path.line').length > 0")
    page.see("document.querySelector('.drawing').focus()")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.wait("document.querySelector('.plot .read').innerText.startsWith('ckpt-000059')")
    page.click(".plot details summary")
    page.wait("document.querySelectorAll('.plot details table tbody tr').length === 50")
    assert "ckpt-000060" in page.text(".plot details table")
    page.press("Tab")  # from the summary into the table, and back to the drawing
    page.see("document.querySelector('.drawing').focus()")
    page.press("Enter")
    is_at(page, path_of(orders, "/checkpoints/ckpt-000059"))


def test_a_checkpoint_says_what_it_waited_for_and_is_compared(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders, "/checkpoints"))
    page.click_text("ckpt-000060")
    is_at(page, path_of(orders, "/checkpoints/ckpt-000060"))
    assert orders.past[-1].waited_for is not None
    assert page.text(".waited") == orders.past[-1].waited_for
    main = page.text("main")
    assert "Kafka topic orders: partition 0 at offset 72000" in main
    assert "180 files, the last is payments/part-00060.json" in main
    page.wait("document.querySelectorAll('.gantt .bar.is-critical').length > 3")
    page.wait("document.querySelectorAll('.gantt .phase-committing').length > 2")
    assert "critical path" in page.text("main")
    page.click_text("Compare", "button")
    is_at(page, path_of(orders, "/compare/ckpt-000059/ckpt-000060"))
    assert "Stage by stage" in page.text("main")
    assert "648" not in page.text("h1")
    assert "708 → 720" in page.text("main")


def test_what_somebody_reads_of_a_checkpoint_under_way_stays_open(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    server.world.advance(4)
    open_page(page, server, path_of(orders, "/checkpoints/ckpt-000061"))
    page.wait("document.querySelectorAll('.gantt .bar').length > 0")
    page.click(".numbers summary")
    rows = "document.querySelectorAll('.numbers tbody tr').length"
    before = page.wait(rows)
    assert page.see("document.activeElement.matches('.numbers summary')")
    server.world.advance(2)
    page.wait(f"{rows} > {before}")
    assert page.see("document.querySelectorAll('.gantt .bar:not(.gantt-key *)').length") >= page.see(rows)
    assert page.see("document.querySelector('.numbers').open")
    assert page.see("document.activeElement.matches('.numbers summary')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_phase_has_a_colour_on_which_its_name_can_be_read(page: Browser, server: Server, scheme: str) -> None:
    page.prefer(scheme)
    open_page(page, server, path_of(server.world.named("orders"), "/checkpoints/ckpt-000060"))
    phases = page.see('import("/static/gantt.js").then(module => module.PHASES)')
    assert phases == list(get_args(Phase))
    page.wait("document.querySelector('svg.gantt:not([width])') !== null")  # once it is known how wide that may be
    for phase in phases:
        page.see(
            "document.getElementById('try')?.remove();"
            "document.querySelector('svg.gantt:not([width])').insertAdjacentHTML('beforeend',"
            f'\'<g id="try"><rect class="bar phase-{phase}"/><text class="word">x</text></g>\')'
        )
        assert page.see("getComputedStyle(document.querySelector('#try rect')).fill") != "rgb(0, 0, 0)", phase
        assert page.see(BAR_CONTRAST) >= 4.5, phase


def test_tables_show_which_checkpoint_and_what_it_added(page: Browser, server: Server) -> None:
    open_page(page, server, path_of(server.world.named("orders"), "/tables"))
    text = page.text("main")
    assert "Tables show different checkpoints" in text
    assert text.count("shown now") == 3
    for told in ("adds nothing", "not shown yet", "not known"):
        assert told in text


@pytest.mark.parametrize(
    ("path", "newer", "older"),
    [("/checkpoints", "ckpt-000061", "ckpt-000030"), ("/history?kinds=checkpoint", "ckpt-000061", "ckpt-000005")],
)
def test_what_was_asked_for_before_does_not_take_the_place_of_another_page(
    page: Browser, server: Server, path: str, newer: str, older: str
) -> None:
    world, orders = server.world, server.world.named("orders")
    open_page(page, server, path_of(orders, path))
    asked: list[str] = []
    listed = path.partition("?")[0]

    def is_slow(address: str) -> bool:
        is_first = f"{listed}?" in address and "before=" not in address
        if is_first:
            asked.append(address)
        return is_first

    world.is_slow = is_slow
    orders.finish()
    world.tell()
    wait_for(lambda: bool(asked))
    page.click_text("Older")
    page.wait_text(older, "main")
    world.may_answer.set()
    page.see("new Promise(later => setTimeout(later, 500))")
    assert older in page.text("main")
    page.click_text("Newer")
    page.wait_text(newer, "main")


def test_what_a_command_does_is_seen_without_reload(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    now = as_moment(datetime.now(UTC))
    open_page(page, server, path_of(orders, "/checkpoints"))
    page.wait_text("Live", "#connection")
    page.see("window.isTheSame = true")
    place = "elsewhere/by-hand"
    orders.events.append(SavepointTaken(at=now, checkpoint="ckpt-000060", name="by-hand", place=place))
    server.world.tell()
    page.wait_text("by-hand", ".latest-ones")
    go(page, path_of(orders, "/tables"))
    assert "ckpt-000060" in page.text("main")
    orders.versions.popitem()
    orders.events.append(Rewound(at=now, checkpoint="ckpt-000059", how="restore"))
    server.world.tell()
    page.wait("!document.querySelector('main').innerText.includes('ckpt-000060')")
    assert page.see("window.isTheSame")


def test_history_tells_causes_and_is_filtered(page: Browser, server: Server) -> None:
    open_page(page, server, path_of(server.world.named("orders"), "/history"))
    text = page.text("main")
    assert "Recovered from a failure" in text
    assert "Connection reset by peer" in text
    assert "starting spark 2.9 s" in text
    page.click_text("Savepoints")
    page.wait_text("Savepoint ckpt-000060", "main")
    assert "Recovered" not in page.text("main")


def test_one_goes_back_through_all_that_has_happened_and_forth_again(page: Browser, server: Server) -> None:
    open_page(page, server, path_of(server.world.named("orders"), "/history?kinds=checkpoint"))
    assert page.see("document.querySelectorAll('.events > li').length") == 50
    page.click_text("Older")
    page.wait_text("ckpt-000001", "main .events")
    assert page.see("document.querySelectorAll('.events > li').length") == 10
    assert page.see("document.querySelector('[data-go=older]')") is None
    page.click_text("Newer")
    page.wait_text("ckpt-000060", "main .events")


def test_what_happens_comes_into_the_history_without_reload(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders, "/history?kinds=checkpoint"))
    page.see("window.isTheSame = true")
    assert "ckpt-000061" not in page.text("main")
    orders.finish()
    server.world.tell()
    page.wait_text("ckpt-000061", "main .events")
    assert page.see("window.isTheSame")


def test_each_action_says_first_what_it_does_and_asks_for_the_token_once(page: Browser, server: Server) -> None:
    world, orders = server.world, server.world.named("orders")
    open_page(page, server, path_of(orders, "/actions"))
    for name in SAYS:
        page.wait(f"!document.querySelector('[data-action={name}]').disabled")
        page.click(f"[data-action={name}]")
        page.wait("!!document.querySelector('dialog[open]')")
        assert SAYS[name] in page.text("dialog")
        assert len(world.posted) == list(SAYS).index(name)  # nothing is done before a yes
        wants_token = page.see("!!document.querySelector('dialog input[name=token]')")
        assert wants_token == (name == "checkpoint")
        if wants_token:
            page.see("document.querySelector('dialog input').focus()")
            page.type(TOKEN)
        page.click("dialog button.main")
        page.wait(
            "!document.querySelector('dialog') && !document.querySelector('.said').innerText.includes('asked for')"
        )
    assert world.posted == [("orders", name, f"Bearer {TOKEN}") for name in SAYS]
    page.wait_text("The run has ended", ".said")
    page.wait("[...document.querySelectorAll('[data-action]')].every(button => button.disabled)")
    assert page.see("Object.values(localStorage).concat(Object.values(sessionStorage)).join() + document.cookie") == ""


def test_no_is_no_and_a_wrong_token_is_asked_for_again(page: Browser, server: Server) -> None:
    world, orders = server.world, server.world.named("orders")
    open_page(page, server, path_of(orders, "/actions"))
    page.click("[data-action=stop]")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert world.posted == []
    page.click("[data-action=checkpoint]")
    page.see("document.querySelector('dialog input').focus()")
    page.type("wrong")
    page.press("Enter")
    page.wait_text("That token was refused", "dialog")
    page.see("document.querySelector('dialog input').focus()")
    page.type(TOKEN)
    page.press("Enter")
    page.wait_text("ckpt-000061 is complete", ".said")
    assert [token for _, _, token in world.posted] == ["Bearer wrong", f"Bearer {TOKEN}"]
    assert {each.split(" http")[0] for each in page.errors} == {
        "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    }
    page.errors.clear()


def test_actions_that_are_off_say_so(page: Browser, server: Server) -> None:
    server.world.allows_actions = False
    open_page(page, server, path_of(server.world.named("orders"), "/actions"))
    assert "--allow-actions" in page.text("main")
    assert page.see("document.querySelectorAll('main button:not(:disabled)').length") == 0


# Roles of what a user acts on, and of what is told as one thing.
ACTED_ON = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "slider", "DisclosureTriangle"}
TOLD = {"image", "img", "graphics-document", "graphics-symbol", "graphics-object", "table", "dialog"}


def heard(page: Browser) -> list[dict[str, Any]]:
    """What a screen reader gets of a page."""
    page.call("Accessibility.enable")
    return [each for each in page.call("Accessibility.getFullAXTree")["nodes"] if not each["ignored"]]


def nameless(nodes: list[dict[str, Any]]) -> list[str]:
    """The roles of what should have a name, and has none."""
    named = ((each["role"]["value"], each.get("name", {}).get("value")) for each in nodes)
    return [role for role, name in named if role in ACTED_ON | TOLD and not name]


@pytest.mark.parametrize("name", ["all", *EACH])
def test_whoever_hears_a_page_is_told_what_everything_on_it_is(page: Browser, server: Server, name: str) -> None:
    open_page(page, server, "#/" if name == "all" else path_of(server.world.named("orders"), name))
    nodes = heard(page)
    roles = [each["role"]["value"] for each in nodes]
    assert roles.count("main") == 1
    assert "heading" in roles
    assert nameless(nodes) == []
    for each in nodes:
        if each["role"]["value"] in ACTED_ON:
            known = {one["name"]: one["value"].get("value") for one in each["properties"]}
            assert known.get("focusable") or known.get("disabled"), each["name"]
    page.see("void document.querySelector('main').append(document.createElement('button'))")
    assert nameless(heard(page)) == ["button"], "this is how it would be noticed"


def test_keys_alone_reach_a_checkpoint(page: Browser, server: Server) -> None:
    open_page(page, server, "#/")
    page.press("Tab")
    assert page.see("document.activeElement.innerText") == "Skip to the content"
    page.press("Enter")
    assert page.see("document.activeElement.id") == "main"

    def tab_to(text: str) -> None:
        for _ in range(60):
            page.press("Tab")
            if page.see("document.activeElement.innerText?.trim()") == text:
                assert page.see("document.activeElement.matches(':focus-visible')")
                return
        raise AssertionError(f"no key leads to {text}")

    tab_to("orders")
    page.press("Enter")
    page.wait_text("Stages and channels", "main")
    page.see("document.body.focus()")
    tab_to("All checkpoints")
    page.press("Enter")
    page.wait_text("All of them", "main")
    tab_to("ckpt-000060")
    page.press("Enter")
    is_at(page, path_of(server.world.named("orders"), "/checkpoints/ckpt-000060"))


def test_colours_follow_the_system_or_the_switch(page: Browser, server: Server) -> None:
    back = "getComputedStyle(document.documentElement).backgroundColor"
    open_page(page, server, "#/")
    light = page.see(back)
    page.prefer("dark")
    dark = page.see(back)
    assert light != dark
    page.see("(e => { e.value = 'light'; e.dispatchEvent(new Event('change')) })(document.getElementById('theme'))")
    assert page.see(back) == light
    open_page(page, server, "#/")
    assert page.see(back) == light
    page.see("localStorage.clear()")


def test_a_page_that_nobody_sees_holds_no_connection(page: Browser, server: Server) -> None:
    """A browser has six for all of its pages of one server: a seventh page would wait for ever."""
    orders = server.world.named("orders")
    hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    open_page(page, server, path_of(orders))
    page.wait_text("Live", "#connection")
    assert server.streams == 1
    page.see(hide % "true")
    wait_for(lambda: server.streams == 0)
    orders.finish()
    server.world.tell()
    page.see(hide % "false")
    page.wait_text("ckpt-000061", "#strip")
    assert page.see("document.getElementById('lost').hidden")


def test_other_stages_are_drawn_when_there_is_a_checkpoint_of_them(page: Browser, server: Server) -> None:
    orders = server.world.named("orders")
    open_page(page, server, path_of(orders))
    page.wait("document.querySelectorAll('.graph .node').length === 7")
    orders.shape = {name: part for name, part in orders.shape.items() if name not in {"order_log", "large"}}
    orders.generation += 1
    server.world.tell()
    page.wait_text("4", "main dl")  # the generation
    assert page.see("document.querySelectorAll('.graph .node').length") == 7
    orders.finish()
    server.world.tell()
    page.wait("document.querySelectorAll('.graph .node').length === 5")
    page.wait("document.querySelectorAll('.graph .edge').length === 4")


def test_of_a_new_pipeline_the_channels_are_drawn_with_its_first_checkpoint(page: Browser, server: Server) -> None:
    visits = server.world.named("visits")
    visits.state = "running"
    open_page(page, server, path_of(visits))
    page.see("window.isTheSame = true")
    page.wait("document.querySelectorAll('.graph .node').length === 3")
    assert page.see("document.querySelectorAll('.graph .edge').length") == 0
    visits.finish()
    server.world.tell()
    page.wait("document.querySelectorAll('.graph .edge').length === 2")
    page.wait_text("The next run goes on from ckpt-000001", ".outlook")
    visits.finish()
    server.world.tell()
    page.wait_text("The next run goes on from ckpt-000002", ".outlook")
    assert page.see("window.isTheSame")


@pytest.mark.parametrize("path", ["#/p/%E0%A4%A", "#/p/100%/checkpoints"])
def test_an_address_that_cannot_be_understood_is_told_as_such(page: Browser, server: Server, path: str) -> None:
    page.open("about:blank")
    page.open(f"{server.url}/{path}")
    page.wait_text("There is no such page", "main")
    page.click_text("All pipelines")
    page.wait_text("orders", "main table")


# -- a thousand checkpoints, a hundred stages -------------------------------------------------------
#
# What a page costs is what is in it, and what of it is touched: both are counted here, as no clock of a test is one of
# its readers. The page's own clock stands still, so that nothing changes but what a test changes.

STAND_STILL = "void (Date.now = (at => () => at)(Date.now()))"
# Each with the element that it is in; a text that is gone is in none.
TOUCHED = (
    "turns.flat().map(({ target, addedNodes }) => ({ target: target.nodeType === 3 ? target.parentNode : target,"
    " addedNodes })).filter(({ target }) => target !== null)"
)
IS_DRAWN = "document.querySelector('.dag')?.getAttribute('aria-busy') === 'false'"


@pytest.fixture(scope="module")
def large() -> Iterator[Server]:
    """For tests that leave it as it is, but for checkpoints that they add."""
    with serving(World(many=1000)) as server:
        yield server


@pytest.fixture
def large_page(browser: Browser) -> Iterator[Browser]:
    browser.errors.clear()
    browser.size(DESKTOP)
    browser.prefer("light")
    yield browser
    browser.open("about:blank")
    assert browser.errors == []


def watch(page: Browser, selector: str) -> None:
    """From now on, what is touched in an element: of each turn of the browser's its own list."""
    page.see(
        "window.turns = []; new MutationObserver(all => turns.push(all))"
        f".observe(document.querySelector({json.dumps(selector)}),"
        " { subtree: true, childList: true, attributes: true, characterData: true })"
    )


def the_large_one(server: Server) -> FakePipeline:
    return server.world.named("fleet <b>north</b>")


def test_however_many_checkpoints_and_stages_there_are_little_is_in_a_page(large_page: Browser, large: Server) -> None:
    fleet = the_large_one(large)
    for path in (*EACH[:2], "/checkpoints/ckpt-000990", "/compare/ckpt-000989/ckpt-000990", *EACH[4:]):
        open_page(large_page, large, path_of(fleet, path))
        if not path:
            large_page.wait(f"{IS_DRAWN} && document.querySelectorAll('.graph .node').length === 100")
        assert large_page.see("document.querySelectorAll('*').length") < 2600, path
        tables = large_page.see("[...document.querySelectorAll('main tbody')].map(each => each.rows.length)")
        assert max(tables, default=0) <= 25, path
    open_page(large_page, large, path_of(fleet, "/checkpoints"))
    points = large_page.wait(
        "Math.max(...[...document.querySelectorAll('.plot path')].map(e => e.getAttribute('d').length))"
    )
    assert points < 20_000


def test_a_large_graph_is_drawn_a_few_stages_in_a_frame(large_page: Browser, large: Server) -> None:
    open_page(large_page, large, path_of(the_large_one(large)))
    large_page.wait(IS_DRAWN)
    watch(large_page, ".dag")
    large_page.size(PHONE)  # from above, so all of it is another
    large_page.wait("document.querySelectorAll('.graph.is-above .node').length === 100")
    large_page.wait(IS_DRAWN)
    made = large_page.see(
        "turns.map(all => all.flatMap(each => [...each.addedNodes])"
        ".filter(each => each.matches?.('.node, .edge')).length).filter(Boolean)"
    )
    assert sum(made) == large_page.see("document.querySelectorAll('.node, .edge').length")
    assert max(made) <= 24


def test_a_change_of_one_stage_touches_what_tells_of_it_alone(
    large_page: Browser, large: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = the_large_one(large)
    open_page(large_page, large, path_of(fleet))
    large_page.wait_text("Live", "#connection")
    large_page.see(STAND_STILL)
    rate = fleet.rate
    monkeypatch.setattr(fleet, "rate", lambda name: 7 if name == "step_1_05" else rate(name))
    large.world.tell()  # with this the ages of all are those of the clock that stands still
    large_page.wait("document.querySelector('.node[aria-label*=\"step_1_05: 7/s\"]') !== null")
    large_page.wait(IS_DRAWN)
    watch(large_page, "body")
    large.world.tell()  # nothing has changed
    monkeypatch.setattr(fleet, "rate", lambda name: 8 if name == "step_1_05" else rate(name))
    large.world.tell()
    large_page.wait("document.querySelector('.node[aria-label*=\"step_1_05: 8/s\"]') !== null")
    large_page.wait(IS_DRAWN)
    touched = large_page.see(
        f"[...new Set({TOUCHED}.map(({{ target }}) => target.closest('tr, .node, .flow, .edge') ?? target))]"
        ".filter(each => each !== document.querySelector('.dag')).map(each => each.outerHTML)"
    )
    readers = sum("step_1_05" in inputs for _, inputs in fleet.shape.values())
    assert sum('class="node' in each for each in touched) == 1
    assert len(touched) <= 2 + 2 * readers, touched  # its row too, and each of its channels with the words at it


@pytest.mark.parametrize(
    ("path", "rows"), [("/checkpoints", "table.stacks tbody"), ("/tables", ".matrix tbody"), ("/history?kinds=", "ol")]
)
def test_one_more_checkpoint_is_one_more_row_and_no_other_is_touched(
    large_page: Browser, large: Server, path: str, rows: str
) -> None:
    fleet = the_large_one(large)
    open_page(large_page, large, path_of(fleet, path))
    large_page.wait_text("Live", "#connection")
    watch(large_page, f"main {rows}")
    name = fleet.finish()
    large.world.tell()
    large_page.wait_text(name, f"main {rows}")
    touched = large_page.see(
        f"{TOUCHED}.filter(({{ target }}) => !target.closest('time'))"
        ".map(each => [each.target.nodeName, [...each.addedNodes].map(added => added.nodeName)])"
    )
    assert sum(added in (["TR"], ["LI"]) for _, added in touched) == 1
    # The one that all tables show is marked in the row before no more, and bars are of another scale.
    assert len(touched) <= 2 + 4 * len(fleet.sinks), touched


def test_of_many_stages_those_that_are_not_shown_are_found(large_page: Browser, large: Server) -> None:
    fleet = the_large_one(large)
    open_page(large_page, large, path_of(fleet))
    names = "[...document.querySelectorAll('.paged tbody th')].map(each => each.innerText)"
    every = list(fleet.shape)
    assert large_page.see(names) == every[:25]
    large_page.click_text("After", ".paged button")
    large_page.wait_text("26 to 50 of 100", ".paged .pager")
    assert large_page.see(names) == every[25:50]
    large_page.see("document.querySelector('.paged input').focus()")
    large_page.type("table_0")
    large_page.wait_text("1 to 10 of 10", ".paged .pager")
    large.world.tell()
    assert large_page.see(names) == [name for name in every if "table_0" in name]
    assert large_page.see("document.activeElement.value") == "table_0"
    large_page.type("x")
    large_page.wait_text("None has that in its name", ".paged .pager")


def test_numbers_are_told_as_people_read_them(page: Browser, server: Server) -> None:
    open_page(page, server, "#/")
    told = page.see("""import("/static/words.js").then(w => ({
      durations: [0, 999, 1500, 45000, 150000, 9e6, 3e8, null].map(w.duration),
      bytes: [0, 999, 1500, 123456, 5e6, 7.5e9, null].map(w.bytes),
      counts: [0, 9999, 123456].map(w.shortCount),
      capitals: ["held back", "ckpt-000061 is complete", "step_1 is held back", ""].map(w.capital),
      times: w.withTimes("since 2026-11-18T04:52:16.678+00:00: why").length,
    }))""")
    assert told == {
        "durations": ["0 ms", "999 ms", "1.5 s", "45 s", "3 min", "3 h", "3 d", NONE],
        "bytes": ["0 B", "999 B", "1.5 kB", "123 kB", "5.0 MB", "7.5 GB", NONE],
        "counts": ["0", "9,999", "123.5K"],
        "capitals": ["Held back", "ckpt-000061 is complete", "step_1 is held back", ""],
        "times": told["times"],
    }
    assert told["times"] < 35


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_what_is_behind_them(page: Browser, server: Server, scheme: str) -> None:
    """A contrast of 4.5 at least, for all text of these pages (WCAG 2.2, AA)."""
    server.world.advance(4)
    page.prefer(scheme)
    fleet = server.world.named("fleet <b>north</b>")
    open_page(page, server, "#/")
    for path in ["#/", *(path_of(fleet, each) for each in ("", "/checkpoints", "/history", "/tables", "/actions"))]:
        go(page, path)
        assert page.see(CONTRAST) == [], path


COLOURS = """
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data] };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * ((v) => v <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4)(c[i] / 255), 0);
  const contrast = (...two) => { const [a, b] = two.map(light).sort((x, y) => y - x); return (a + 0.05) / (b + 0.05) };
"""
# What a bar says has a halo, of white that lets the bar through.
BAR_CONTRAST = f"""(() => {{ {COLOURS}
  const [bar, word] = ["rect", "text"].map(each => getComputedStyle(document.querySelector(`#try ${{each}}`)));
  const behind = rgba(bar.fill).map((part) => part * 0.4 + 255 * 0.6);
  return contrast(rgba(word.fill), behind);
}})()"""
CONTRAST = (
    f"(() => {{ {COLOURS}"
    """
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] > 250) return c } return [255, 255, 255, 255] };
  const found = new Set();
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    if (e.closest(":disabled, .hidden, .skip, option, svg")) continue;
    const by = contrast(rgba(getComputedStyle(e).color), behind(e));
    if (by < 4.5) found.add(`${e.tagName}.${e.className}: ${by.toFixed(2)}`);
  }
  return [...found];
})()"""
)

"""`tidegate graph`: the drawing shows the DAG and nothing else. Its lines are followed as a reader follows them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.harness import in_terminal, make_root, tidegate
from tidegate.cli.drawing.listing import as_list
from tidegate.cli.drawing.mermaid import as_mermaid
from tidegate.cli.drawing.svg import as_svg
from tidegate.cli.drawing.text import as_text
from tidegate.engine.layout import DrawnStage, layered
from tidegate.engine.root import Root

Edges = set[tuple[str, str]]

RIGHT, LEFT, DOWN, UP = (0, 1), (0, -1), (1, 0), (-1, 0)
WAYS = {
    "─": {LEFT, RIGHT},
    "│": {UP, DOWN},
    "┌": {RIGHT, DOWN},
    "┐": {LEFT, DOWN},
    "└": {RIGHT, UP},
    "┘": {LEFT, UP},
    "├": {UP, DOWN, RIGHT},
    "┤": {UP, DOWN, LEFT},
    "┬": {LEFT, RIGHT, DOWN},
    "┴": {LEFT, RIGHT, UP},
    "┼": {LEFT, RIGHT, UP, DOWN},
}


def stages_of(graph: dict[str, tuple[str, ...]]) -> list[DrawnStage]:
    read = {name for inputs in graph.values() for name in inputs}
    return [
        DrawnStage(name, "source" if not inputs else "stage" if name in read else "sink", inputs)
        for name, inputs in graph.items()
    ]


def edges_of(graph: dict[str, tuple[str, ...]]) -> Edges:
    return {(source, target) for target, inputs in graph.items() for source in inputs}


class Reader:
    """Follows the lines of a drawing from each stage to the arrows at their ends."""

    def __init__(self, drawing: str, names: set[str]) -> None:
        self._rows = drawing.split("\n")
        self._boxes: dict[tuple[int, int], str] = {}  # every cell of a stage's border and inside
        self._exits: dict[str, tuple[int, int]] = {}
        for row, text in enumerate(self._rows):
            for column in range(len(text)):
                if text[column] == "│" and (name := self._name_behind(row, column)) in names:
                    self._add_box(name, row, column)

    def _name_behind(self, row: int, column: int) -> str:
        return self._rows[row][column + 1 :].partition("│")[0].strip()

    def _add_box(self, name: str, row: int, left: int) -> None:
        right = self._rows[row].index("│", left + 1)
        top = bottom = row
        while self.at(top, left) != "┌":
            top -= 1
        while self.at(bottom, left) != "└":
            bottom += 1
        for each in range(top, bottom + 1):
            for column in range(left, right + 1):
                self._boxes[each, column] = name
        self._exits[name] = (row, right)

    def at(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self._rows) and 0 <= column < len(self._rows[row])
        return self._rows[row][column] if inside else " "

    def edges(self) -> Edges:
        return {(name, target) for name, (row, column) in self._exits.items() for target in self._ends(row, column)}

    def _ends(self, row: int, column: int) -> list[str]:
        found: list[str] = []
        seen: set[tuple[int, int, tuple[int, int]]] = set()
        heads = [(row, column, RIGHT)]
        while heads:
            row, column, way = heads.pop()
            row, column = row + way[0], column + way[1]
            if (row, column, way) in seen or (row, column) in self._boxes:
                continue
            seen.add((row, column, way))
            character = self.at(row, column)
            if character == "▶":
                found.append(self._boxes[row, column + 1])
            elif character == "│" and way in (LEFT, RIGHT):
                heads.append((row, column, way))  # another line goes over this one
            elif character in WAYS:
                back = (-way[0], -way[1])
                assert back in WAYS[character], f"a line breaks off before {character!r} at {row}, {column}"
                heads += [(row, column, each) for each in WAYS[character] if each != back]
        assert len(found) == len(set(found))
        return found


SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "chain": {"a": (), "b": ("a",), "c": ("b",)},
    "fan-out": {"a": (), "b": ("a",), "c": ("a",), "d": ("a",)},
    "fan-in": {"a": (), "b": (), "c": (), "d": ("a", "b", "c")},
    "diamond": {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")},
    "passing a layer": {"a": (), "b": ("a",), "c": ("b",), "d": ("a", "c"), "e": ("a",)},
    "several sources": {"a": (), "b": (), "c": ("a", "b"), "d": ("b",), "e": ("c",), "f": ("c", "d")},
    "all read all": {"a": (), "b": (), "c": ("a", "b"), "d": ("a", "b"), "e": ("c", "d"), "f": ("c", "d")},
    "two apart": {"a": (), "b": (), "c": ("a",), "d": ("b",)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_following_the_lines_of_the_drawing_leads_to_the_readers(shape: str) -> None:
    graph = SHAPES[shape]
    assert Reader(as_text(stages_of(graph)), set(graph)).edges() == edges_of(graph)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    names = [f"s{number}" for number in range(draw(st.integers(1, 12)))]
    return {
        name: tuple(draw(st.lists(st.sampled_from(names[:index]), unique=True, max_size=4))) if index else ()
        for index, name in enumerate(names)
    }


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_it_does_so_for_any_graph(graph: dict[str, tuple[str, ...]]) -> None:
    assert Reader(as_text(stages_of(graph)), set(graph)).edges() == edges_of(graph)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_stages_do_not_overlap_and_stand_behind_what_they_read(graph: dict[str, tuple[str, ...]]) -> None:
    for layer in layered(stages_of(graph)):
        for above, below in pairwise(layer):
            assert above.row + above.height <= below.row
        for place in layer:
            assert all(source.layer == place.layer - 1 for source in place.inputs)


SMALL = """
                  ┌─ sink ─┐
┌─ source ─┐  ┌──▶│  log   │
│  orders  │──┤   └────────┘
└──────────┘  │   ┌─ sink ─┐
┌─ source ─┐  └──▶│        │
│ payments │─────▶│  paid  │
└──────────┘      └────────┘
"""


def test_the_drawing_of_a_small_pipeline_is_this() -> None:
    graph: dict[str, tuple[str, ...]] = {"orders": (), "payments": (), "paid": ("orders", "payments")}
    assert as_text(stages_of({**graph, "log": ("orders",)})) == SMALL.strip("\n")


def test_the_svg_has_every_stage_and_every_edge_and_names_are_escaped() -> None:
    name = '<b>&"odd"'
    stages = [DrawnStage(name, "source", ()), DrawnStage("out", "sink", (name,), "update")]
    picture = ET.fromstring(as_svg(stages, "pipeline <odd>"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in picture.iter(f"{space}text")]
    assert texts == ["source", name, "sink · update", "out"]
    assert len([path for path in picture.iter(f"{space}path") if path.get("marker-end")]) == 1
    assert "prefers-color-scheme: dark" in as_svg(stages, "")


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_the_svg_has_an_arrow_per_edge(graph: dict[str, tuple[str, ...]]) -> None:
    assert as_svg(stages_of(graph), "any").count("marker-end") == len(edges_of(graph))


def test_mermaid_quotes_names_and_uses_none_as_a_word_of_its_own() -> None:
    stages = [DrawnStage("end", "source", ()), DrawnStage('say "x"', "stage", ("end",)), DrawnStage("t", "sink", ())]
    assert as_mermaid(stages).splitlines() == [
        "flowchart LR",
        '    s0(["end"])',
        '    s1["say #quot;x#quot;"]',
        '    s2[("t")]',
        "    s0 --> s1",
    ]


# -- as a list --------------------------------------------------------------------------------------


def edges_in_list(listed: str, graph: dict[str, tuple[str, ...]]) -> Edges:
    """What a reader makes of a list: a stage's name stands first, and after each arrow what it reads."""
    found: Edges = set()
    stage = ""
    for line in listed.split("\n"):
        head, arrow, inputs = line.partition("◀")
        if not arrow and (continues := [word.strip(",") for word in head.split()]) and head.startswith(" " * 12):
            found |= {(name, stage) for name in continues}
            continue
        stage = next((word for word in head.split() if word in graph), stage)
        found |= {(name.strip(), stage) for name in inputs.split(",") if name.strip()}
    return found


@settings(max_examples=200, deadline=None)
@given(graphs(), st.sampled_from(["", "_of_all_the_countries_we_sell_to"]), st.integers(30, 120))
def test_a_list_of_any_graph_names_every_edge_and_fits(
    graph: dict[str, tuple[str, ...]], suffix: str, width: int
) -> None:
    named = {f"{name}{suffix}": tuple(f"{each}{suffix}" for each in inputs) for name, inputs in graph.items()}
    listed = as_list(stages_of(named), width)
    assert edges_in_list(listed, named) == edges_of(named)
    assert max(len(line) for line in listed.split("\n")) <= max(width, len(f"s11{suffix}") + len("  ◀ "))


LISTED = """
source         orders
source         payments
stage          large     ◀ orders
sink (update)  paid      ◀ large,
                           payments
"""


def test_the_list_of_a_small_pipeline_is_this() -> None:
    stages = [
        DrawnStage("orders", "source", ()),
        DrawnStage("payments", "source", ()),
        DrawnStage("large", "stage", ("orders",)),
        DrawnStage("paid", "sink", ("large", "payments"), "update"),
    ]
    assert as_list(stages, 40) == LISTED.strip("\n")
    below = "stage          large\n  ◀ orders\nsink (update)  paid\n  ◀ large\n  ◀ payments"
    assert as_list(stages, 30).endswith(below)
    assert as_list(stages, 15).endswith("sink (update)\n  paid\n  ◀ large\n  ◀ payments")


# -- the command ------------------------------------------------------------------------------------

PIPELINE = """
import tidegate as tg

pipeline = tg.Pipeline("drawn")

@pipeline.source
def rows(spark): ...

@pipeline.sink(tg.DeltaTable("lake/kept"))
def kept(rows): ...
"""


def test_a_pipeline_is_drawn_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    done = tidegate("graph", tmp_path / "drawn.py")
    assert done.returncode == 0
    assert Reader(done.stdout, {"rows", "kept"}).edges() == {("rows", "kept")}
    assert not (tmp_path / "lake").exists()


def test_what_is_wider_than_the_terminal_is_listed_and_a_file_or_a_pipe_gets_the_drawing(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    drawn = tidegate("graph", tmp_path / "drawn.py").stdout
    widest = max(len(line) for line in drawn.splitlines())
    assert in_terminal("graph", tmp_path / "drawn.py", width=widest).stdout == drawn
    listed = in_terminal("graph", tmp_path / "drawn.py", width=widest - 1)
    assert (listed.returncode, listed.stdout) == (0, "source  rows\nsink    kept  ◀ rows\n")
    assert in_terminal("graph", tmp_path / "drawn.py", "--out", tmp_path / "drawn.txt", width=20).returncode == 0
    assert (tmp_path / "drawn.txt").read_text(encoding="utf-8") == drawn.rstrip("\n")


def test_a_root_is_drawn_as_of_its_newest_checkpoint(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    edges = {("rows", "middle"), ("middle", "table")}
    assert Reader(tidegate("graph", "--root", root).stdout, {"rows", "middle", "table"}).edges() == edges
    assert tidegate("graph", "--root", root, "--format", "mermaid").stdout.startswith("flowchart LR\n")
    assert tidegate("graph", "--root", root, "--format", "svg", "--out", tmp_path / "g.svg").stdout == ""
    assert "pipeline flat" in (tmp_path / "g.svg").read_text(encoding="utf-8")


def test_a_root_of_another_pipeline_than_the_one_that_was_named_is_not_drawn(tmp_path: Path) -> None:
    root = make_root(tmp_path, checkpoints=1)
    assert tidegate("graph", "--root", root, "--pipeline", "flat").returncode == 0
    done = tidegate("graph", "--root", root, "--pipeline", "orders")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: {root} belongs to pipeline 'flat', not to 'orders'; name its own or none\n"


def test_a_drawing_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(PIPELINE, encoding="utf-8")
    done = tidegate("graph", tmp_path / "drawn.py", "--out", tmp_path / "missing" / "drawn.svg")
    assert done.returncode == 2
    assert done.stderr == f"error: --out {tmp_path}/missing/drawn.svg cannot be written: No such file or directory\n"


def test_a_root_without_a_checkpoint_cannot_be_drawn_and_says_what_can(tmp_path: Path) -> None:
    Root(tmp_path / "root", "flat")
    done = tidegate("graph", "--root", tmp_path / "root")
    assert done.returncode == 3
    assert "tidegate graph FILE" in done.stderr


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n1 / 0\n", "cannot be loaded at line 2: ZeroDivisionError: division by zero"),
        ("def broken(:\n", "SyntaxError"),
        ("x = 1\n", "defines no pipeline; define one"),
        ("import tidegate as tg\np = tg.Pipeline('empty')\n", "has no sink"),
    ],
)
def test_a_file_that_defines_no_pipeline_is_refused_in_one_line(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "wrong.py").write_text(source, encoding="utf-8")
    done = tidegate("graph", tmp_path / "wrong.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1

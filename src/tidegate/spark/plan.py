"""What a stage keeps as state, read from its plan.

Spark's own check compares the types of state by position, when the first batch runs: two columns of one type that
change places, a minimum where a maximum was, pass it, and what is stored is taken for something else. So everything is
described here by what it stands for, in terms of the columns that the stage reads. The optimised plan is read, not the
one that the user wrote: which columns of a join are stored, and in which order sums are, is decided by the optimiser
(it leaves out what nobody asks for later, and takes over the order of a later `select`).

The plan comes as Spark's JSON of it, in one call. Expressions are followed through aliases and projections down to what
is read, so that a column that is only renamed on the way is the same column.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.types import StructType

from tidegate.errors import first_line
from tidegate.spark.processor import state_variables
from tidegate.storage.manifest import StageState, StateColumn, StateOperator, WatermarkDelay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("tidegate")

AGGREGATION: Final = "aggregation"
DEDUPLICATION: Final = "deduplication"
WITHIN_WATERMARK: Final = "deduplication within the watermark"
JOIN: Final = "join"
TRANSFORM: Final = "transformWithState"
PANDAS: Final = "applyInPandasWithState"
LIMIT: Final = "limit"

_KINDS: Final = {
    "Aggregate": AGGREGATION,
    "Deduplicate": DEDUPLICATION,
    "DeduplicateWithinWatermark": WITHIN_WATERMARK,
    "Join": JOIN,
    "TransformWithStateInPySpark": TRANSFORM,
    "FlatMapGroupsInPandasWithState": PANDAS,
    "GlobalLimit": LIMIT,
}
_MAY_KEEP_STATE: Final = re.compile(rf"^[\s:+|-]*~({'|'.join([*_KINDS, 'Distinct'])})\b", re.MULTILINE)
_WATERMARK: Final = re.compile(r"^[\s:+|-]*~?EventTimeWatermark .*, ([^,\n]+)$", re.MULTILINE)
_STREAMS: Final = ("StreamingRelation", "StreamingRelationV2", "StreamingExecutionRelation")
_GATE: Final = re.compile(r"/gates/([^/\]]+)\]$")
_ID: Final = re.compile(r"#\d+L?")
_ASKS_FOR_THE_TIME: Final = re.compile(r"\b(current_(timestamp|date|time)|localtimestamp|now)\(")
_ADDRESS: Final = re.compile(r"@[0-9a-f]+\b")

_SAME_AS_ITS_CHILD: Final = (
    "Alias",
    "KnownNullable",
    "KnownNotNull",
    "NormalizeNaNAndZero",
    "KnownFloatingPointNormalized",
)
_INFIX: Final = {
    "And": "and", "Or": "or", "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=",
    "GreaterThan": ">", "GreaterThanOrEqual": ">=", "Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/",
    "Remainder": "%", "TimestampAddInterval": "+",
}  # fmt: skip
# Of no meaning for what comes out, or not the same from run to run.
_NO_MEANING: Final = ("class", "num-children", "nullable", "timeZoneId", "evalMode", "evalContext", "failOnError")
_DAYS_OF_A_ZONE: Final = ("date", "timestamp")
_THREADS: Final = 8
_TIMES: Final = ("date", "timestamp", "timestamp_ntz")
_UNTOLD: Final = "…"
CONSTANT: Final = "a constant"
_BY_CHANCE: Final = ("Rand", "Randn", "RandStr", "Uniform", "Uuid", "Shuffle")  # with another seed at every start
_ONE_SIDED: Final = ("LeftSemi", "LeftAnti")
_UNITS: Final = (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000))


class Node:
    """A node of a plan, or of an expression. `path` leads to it from the root, by the numbers of children."""

    __slots__ = ("children", "fields", "kind", "path")

    def __init__(self, fields: dict[str, Any], path: tuple[int, ...]) -> None:
        self.fields = fields
        self.kind = str(fields["class"]).rpartition(".")[2]
        self.path = path
        self.children: list[Node] = []

    def walk(self) -> Iterator[Node]:
        """It and all below, in Spark's order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def id(self) -> int:
        """The number by which an attribute, or an alias, is told from others."""
        return int(self.fields["exprId"]["id"])

    def expressions(self, field: str) -> list[Node]:
        return _expressions(self.fields.get(field))

    def object(self, field: str) -> str:
        """The name of a constant of Spark's, such as a join type."""
        value = self.fields.get(field)
        named = value.get("object") or value.get("product-class") if isinstance(value, dict) else value
        return re.split(r"[.$]", str(named).rstrip("$"))[-1]


def tree(flat: list[dict[str, Any]]) -> Node:
    """A tree from its nodes in pre-order, each with the number of its children."""
    nodes = iter(flat)

    def grow(path: tuple[int, ...]) -> Node:
        node = Node(next(nodes), path)
        node.children = [grow((*path, number)) for number in range(node.fields["num-children"])]
        return node

    return grow(())


def _expressions(value: Any) -> list[Node]:
    if not isinstance(value, list) or not value:
        return []
    if isinstance(value[0], dict):
        return [tree(value)] if "class" in value[0] else []
    return [each for item in value for each in _expressions(item)]


# -- from a DataFrame -------------------------------------------------------------------------------


@contextmanager
def states_of(frames: Mapping[str, DataFrame]) -> Iterator[Callable[[str], StageState | None]]:
    """What each stage will keep as state, for whoever asks for it: it is found out beside what is done meanwhile.

    None where that cannot be told.
    """
    with ThreadPoolExecutor(_THREADS, "tidegate-plan") as threads:
        found = {name: threads.submit(_state_if_known, name, frame) for name, frame in frames.items()}
        yield lambda name: found[name].result()


def _state_if_known(stage: str, frame: DataFrame) -> StageState | None:
    try:
        return state_of(frame)
    except Exception as error:  # of a plan that this has never seen
        _log.warning(
            "stage %r: what it keeps as state cannot be read from its plan (%s: %s), so if that has changed, a batch "
            "fails, or takes what is stored for something else",
            stage,
            type(error).__name__,
            first_line(error),
        )
        return None


def has_state(frame: DataFrame) -> bool:
    """Whether the query of a DataFrame will keep state, or might."""
    return _MAY_KEEP_STATE.search(frame._jdf.queryExecution().analyzed().toString()) is not None


def state_of(frame: DataFrame) -> StageState:
    """What the query of a DataFrame will keep as state. To be called in a thread of its own: it sets its session."""
    version = frame.sparkSession.version
    analyzed = frame._jdf.queryExecution().analyzed()
    as_text = analyzed.toString()
    if _MAY_KEEP_STATE.search(as_text) is None:
        return StageState(version)
    session, jvm = frame._jdf.sparkSession(), frame.sparkSession._jvm
    assert jvm is not None
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(session)  # the optimiser asks for its settings
    plan = session.sessionState().optimizer().execute(analyzed)
    # The optimiser puts the time of this start in place of the question for it, and goes on to compute with that.
    written = _literals(tree(_decoded(analyzed))) if _ASKS_FOR_THE_TIME.search(as_text) else None
    return _Reading(plan, str(session.sessionState().conf().sessionLocalTimeZone()), written).state(version)


def _decoded(plan: Any) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = msgspec.json.decode(plan.toJSON())
    return nodes


def _literals(plan: Node) -> set[str | float]:
    return {
        _as_literal(part)
        for node in plan.walk()
        for field in node.fields
        for each in node.expressions(field)
        for part in each.walk()
        if part.kind == "Literal"
    }


def _as_literal(node: Node) -> str | float:
    """A constant's value, of whatever type of numbers the optimiser has made it."""
    value = str(node.fields.get("value"))
    try:
        return float(value)
    except ValueError:
        return value


def _at(found: Any, path: tuple[int, ...]) -> Any:
    """What stands for a node in the JVM."""
    for number in path:
        found = found.children().apply(number)
    return found


class _Reading:
    """One plan that is being read. `written`: the constants of the one that the user wrote, where others may come from
    the time."""

    def __init__(self, plan: Any, time_zone: str, written: set[str | float] | None) -> None:
        self._plan = plan
        self._time_zone = time_zone
        self._written = written
        self._root = tree(_decoded(plan))
        self._made_of: dict[int, Node] = {}
        self._read: dict[int, str] = {}
        self._is_zoned = False
        self._note_origins()

    def state(self, version: str) -> StageState:
        operators = tuple(self._operator(node) for node in self._root.walk() if _keeps_state(node))
        # Spark says "1 minutes".
        delays = [re.sub(r"\b1 (\w+)s\b", r"1 \1", each) for each in _WATERMARK.findall(self._plan.toString())]
        columns = [
            self._text(node.expressions("eventTime")[0])
            for node in self._root.walk()
            if node.kind == "EventTimeWatermark"
        ]
        watermarks = tuple(WatermarkDelay(*pair) for pair in zip(columns, delays, strict=True))
        return StageState(version, operators, watermarks, self._time_zone if self._is_zoned else None)

    # -- where columns come from ------------------------------------------------------------------

    def _note_origins(self) -> None:
        leaves = [node for node in self._root.walk() if not node.children and node.expressions("output")]
        labels = {node.path: _label(node) for node in leaves}
        has_several = len(set(labels.values())) > 1
        for node in self._root.walk():
            for field in node.fields:
                for each in node.expressions(field):
                    if each.kind == "Alias":
                        self._made_of.setdefault(each.id, each.children[0])
            if node.kind == "Expand":
                self._note_pairs(node.expressions("output"), _expressions(node.fields["projections"][0]))
            elif node.kind.endswith("EvalPython"):
                self._note_pairs(node.expressions("resultAttrs"), node.expressions("udfs"))
        for leaf in leaves:
            for column in leaf.expressions("output"):
                name = str(column.fields["name"])
                self._read[column.id] = f"{labels[leaf.path]}.{name}" if has_several else name

    def _note_pairs(self, columns: list[Node], made_of: list[Node]) -> None:
        for column, origin in zip(columns, made_of, strict=False):
            self._made_of.setdefault(column.id, origin)

    def _output(self, node: Node) -> list[Node]:
        """The columns of a node's rows."""
        for field in ("projectList", "aggregateExpressions", "outputAttrs", "outputAttributes", "output"):
            if node.fields.get(field) and (node.kind != "Aggregate" or field == "aggregateExpressions"):
                return node.expressions(field)
        if node.kind == "Join" and node.object("joinType") not in _ONE_SIDED:
            return [each for child in node.children for each in self._output(child)]
        below = self._output(node.children[0]) if node.children else []
        if node.kind.endswith("EvalPython"):
            return [*below, *node.expressions("resultAttrs")]
        return [*below, *node.expressions("windowExpressions")]

    # -- operators --------------------------------------------------------------------------------

    def _operator(self, node: Node) -> StateOperator:
        kind = _KINDS[node.kind]
        if kind == AGGREGATION:
            keys = self._columns(node, "groupingExpressions")
            return StateOperator(kind, keys, tuple(self._aggregates(node)))
        if kind in (DEDUPLICATION, WITHIN_WATERMARK):
            return StateOperator(kind, self._columns(node, "keys"))
        if kind == JOIN:
            return self._join(node)
        if kind == TRANSFORM:
            keys = self._rows(node.children[0], self._key)[: int(node.fields["groupingAttributesLen"])]
            modes = {"time mode": node.object("timeMode"), "output mode": node.object("outputMode")}
            function = _at(self._plan, node.path).functionExpr().func()
            return StateOperator(kind, keys, state_variables(function), modes)
        if kind == PANDAS:
            stored = _at(self._plan, node.path).stateType()
            values = tuple(StateColumn(each.name, each.dataType.simpleString()) for each in _schema(stored).fields)
            modes = {"timeout": node.object("timeout"), "output mode": node.object("outputMode")}
            return StateOperator(kind, self._columns(node, "groupingAttributes"), values, modes)
        return StateOperator(kind)

    def _columns(self, node: Node, field: str) -> tuple[StateColumn, ...]:
        return tuple(
            self._key(each, self._type(node, field, each, at)) for at, each in enumerate(node.expressions(field))
        )

    def _key(self, expression: Node, of_type: str) -> StateColumn:
        origin = self._origin(expression)
        if origin.kind == "Literal":
            return StateColumn(CONSTANT, of_type, self._literal(origin, of_key=True))
        window = self._window(origin)
        name, span = (self._text(expression, of_key=True), "") if window is None else window
        return StateColumn(name, of_type, span)

    def _type(self, node: Node, field: str, expression: Node, at: int) -> str:
        if expression.kind == "AttributeReference":
            return _named_type(expression.fields["dataType"])
        return str(getattr(_at(self._plan, node.path), field)().apply(at).dataType().simpleString())

    def _rows(self, node: Node, described: Callable[[Node, str], StateColumn]) -> tuple[StateColumn, ...]:
        """A node's rows, column by column."""
        fields = _schema(_at(self._plan, node.path).schema()).fields
        columns = self._output(node)
        if len(columns) != len(fields):
            return tuple(StateColumn(each.name, each.dataType.simpleString()) for each in fields)
        return tuple(
            described(column, each.dataType.simpleString()) for column, each in zip(columns, fields, strict=True)
        )

    def _stored(self, column: Node, of_type: str) -> StateColumn:
        """With another constant it is still the same column: that may be the time of this start, or the run's name."""
        if self._origin(column).kind == "Literal":
            return StateColumn(CONSTANT, of_type)
        name, whole = self._text(column, with_constants=False), self._text(column)
        return StateColumn(name, of_type, "" if name == whole else whole)

    def _aggregates(self, node: Node) -> Iterator[StateColumn]:
        """In the order in which Spark stores them, which is that of their first use."""
        told: set[str] = set()
        for at, result in enumerate(node.expressions("aggregateExpressions")):
            for each in result.walk():
                if each.kind == "AggregateExpression" and (whole := self._text(each)) not in told:
                    told.add(whole)
                    function = _at(_at(self._plan, node.path).aggregateExpressions().apply(at), each.path)
                    short = self._aggregate_of_columns(each)
                    yield StateColumn(
                        short, _buffer_type(function.aggregateFunction()), "" if whole == short else whole
                    )

    def _aggregate_of_columns(self, node: Node) -> str:
        distinct = "distinct " if node.fields.get("isDistinct") else ""
        read = dict.fromkeys(column for child in node.children[0].children for column in self._columns_read(child))
        return f"{_function(node.children[0])}({distinct}{', '.join(read) or '*'})"

    def _columns_read(self, expression: Node) -> Iterator[str]:
        for node in expression.walk():
            if node.kind == "AttributeReference":
                origin = self._origin(node)
                if origin.kind == "AttributeReference" or self._window(origin) is not None:
                    yield self._text(origin)
                else:
                    yield from self._columns_read(origin)

    def _join(self, node: Node) -> StateOperator:
        left = {each.id for below in node.children[0].walk() for each in self._defined(below)}
        on: list[tuple[str, str]] = []
        rest: list[str] = []
        for each in [part for whole in node.expressions("condition") for part in _conjuncts(whole)]:
            sides = [self._is_of(each.children[number], left) for number in (0, 1)] if len(each.children) == 2 else []
            if each.kind in ("EqualTo", "EqualNullSafe") and sorted(sides, key=str) == [False, True]:
                first, second = each.children if sides[0] else reversed(each.children)
                on.append((self._text(first, of_key=True), self._text(second, of_key=True)))
            else:
                rest.append(self._text(each))
        stored = [
            msgspec.structs.replace(column, name=f"{side} {column.name}")
            for side, child in zip(("left", "right"), node.children, strict=True)
            for column in self._rows(child, self._stored)
        ]
        settings = {"type": node.object("joinType"), "on": " and ".join(f"{a} = {b}" for a, b in on)}
        return StateOperator(JOIN, (), tuple(stored), settings, {"condition": " and ".join(rest)} if rest else {})

    def _defined(self, node: Node) -> Iterator[Node]:
        for field in node.fields:
            for each in node.expressions(field):
                if "exprId" in each.fields:
                    yield each

    def _is_of(self, expression: Node, ids: set[int]) -> bool | None:
        """Whether all of an expression's columns are among those; None: some are."""
        found = {each.id in ids for each in expression.walk() if each.kind == "AttributeReference"}
        return found.pop() if len(found) == 1 else None

    # -- in words ---------------------------------------------------------------------------------

    def _origin(self, expression: Node) -> Node:
        """What a column was made of, if it was made in this plan."""
        seen: set[int] = set()
        while True:
            if expression.kind in _SAME_AS_ITS_CHILD:
                expression = expression.children[0]
            elif expression.kind == "AttributeReference" and expression.id not in seen:
                seen.add(expression.id)
                made_of = self._made_of.get(expression.id)
                if made_of is None or expression.id in self._read:
                    return expression
                expression = made_of
            else:
                return expression

    def _text(self, expression: Node, *, of_key: bool = False, with_constants: bool = True) -> str:
        node = self._origin(expression)
        if node.kind == "AttributeReference":
            return self._read.get(node.id) or _ID.sub("", str(node.fields["name"]))
        window = self._window(node)
        if window is not None:
            return window[0]
        if node.kind == "Literal":
            return self._literal(node, of_key=of_key) if with_constants else _UNTOLD
        if of_key and _depends_on_zone(node):
            self._is_zoned = True
        parts = [self._text(child, of_key=of_key, with_constants=with_constants) for child in node.children]
        return self._aggregate(node, parts) if node.kind == "AggregateExpression" else _call(node, parts)

    def _aggregate(self, node: Node, parts: list[str]) -> str:
        function, *conditions = parts
        function = "count(*)" if function == "count(1)" else function
        if node.fields.get("isDistinct"):
            function = function.replace("(", "(distinct ", 1)
        return f"{function} where {conditions[0]}" if conditions else function

    def _literal(self, node: Node, *, of_key: bool) -> str:
        of_type, value = node.fields.get("dataType"), str(node.fields.get("value"))
        if of_type in _TIMES or (self._written is not None and _as_literal(node) not in self._written):
            return _UNTOLD  # it may be the time of this start
        if of_type == "string":
            return f"'{value}'"
        # Of bytes, and of what the optimiser has made to compute with, it is only where it lies in memory.
        zone = f"Some({self._time_zone})"
        self._is_zoned |= of_key and zone in value
        return _ADDRESS.sub("", value.replace(zone, ""))

    def _window(self, node: Node) -> tuple[str, str] | None:
        """A window of time, or where one starts or ends, and how long it is."""
        if node.kind == "PreciseTimestampConversion":
            return self._edge(node)
        if node.kind != "CreateNamedStruct" or len(node.children) != 4:
            return None
        names = [node.children[number].fields.get("value") for number in (0, 2)]
        start, end = node.children[1], node.children[3]
        times = [each for each in start.walk() if each.kind == "PreciseTimestampConversion"]
        if names != ["start", "end"] or not times:
            return None
        column = self._text(times[-1].children[0])
        gap = next((each for each in end.walk() if each.kind == "TimestampAddInterval"), None)
        if gap is not None:
            return f"session_window({column})", self._text(gap.children[1])
        slide = next((each for each in start.walk() if each.kind == "Remainder"), None)
        length = next((each for each in end.walk() if each.kind == "Add"), None)
        if slide is None or length is None:
            return None
        offset = next(each for each in slide.children[0].walk() if each.kind == "Literal")
        spans = [_span(each.fields["value"]) for each in (length.children[1], slide.children[1], offset)]
        return f"window({column})", _every(*spans)

    def _edge(self, node: Node) -> tuple[str, str] | None:
        """Of a window that the optimiser has left no more of."""
        slide = next((each for each in node.walk() if each.kind == "Remainder"), None)
        if slide is None:
            return None
        times = [each for each in node.walk() if each.kind == "PreciseTimestampConversion"]
        edge = "end" if node.children[0].kind == "Add" else "start"
        return (
            f"window({self._text(times[-1].children[0])}).{edge}",
            f"every {_span(slide.children[1].fields['value'])}",
        )


def _keeps_state(node: Node) -> bool:
    if node.kind == "Join":
        return all(map(_is_streaming, node.children))
    return node.kind in _KINDS and _is_streaming(node.children[0])


def _is_streaming(node: Node) -> bool:
    return any(each.kind in _STREAMS or each.fields.get("isStreaming") is True for each in node.walk())


def _label(leaf: Node) -> str:
    """Which of a stage's inputs it is, and nothing that differs from run to run."""
    gate = _GATE.search(str(leaf.fields.get("sourceName")))
    if gate is not None:
        return gate[1]
    return "stream" if _is_streaming(leaf) else "table"


def _call(node: Node, parts: list[str]) -> str:
    """An expression in words, from those of its children."""
    match node.kind:
        case "NamedLambdaVariable":  # numbered as it was made
            return re.sub(r"_\d+$", "", str(node.fields["name"]))
        case "Cast":
            return f"cast({parts[0]} as {_named_type(node.fields['dataType'])})"
        case "GetStructField":
            return f"{parts[0]}.{node.fields.get('name') or node.fields['ordinal']}"
        case kind if kind in _BY_CHANCE:
            return f"{_function(node)}()"
        case kind if kind in _INFIX and len(parts) == 2:
            return f"({parts[0]} {_INFIX[kind]} {parts[1]})"
    return f"{_function(node)}({', '.join([*parts, *_flags(node)])})"


def _conjuncts(condition: Node) -> Iterator[Node]:
    if condition.kind == "And":
        for child in condition.children:
            yield from _conjuncts(child)
    else:
        yield condition


def _depends_on_zone(node: Node) -> bool:
    if node.kind == "Cast":
        return node.fields.get("dataType") in _DAYS_OF_A_ZONE
    return bool(node.fields.get("timeZoneId")) and node.kind not in _INFIX


def _function(node: Node) -> str:
    if node.kind == "PythonUDF":
        return str(node.fields["name"])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.kind).lower()


def _flags(node: Node) -> Iterator[str]:
    """What an expression is told apart by besides its children."""
    if node.kind == "PythonUDF":
        return
    for name, value in node.fields.items():
        is_child = isinstance(value, int) and not isinstance(value, bool) and value < len(node.children)
        if name not in _NO_MEANING and isinstance(value, str | int | float) and not is_child and value is not False:
            yield f"{name}={_ADDRESS.sub('', _ID.sub('', str(value)))}"


def _named_type(json: Any) -> str:
    field = {"name": "it", "type": json, "nullable": True, "metadata": {}}
    return StructType.fromJson({"type": "struct", "fields": [field]}).fields[0].dataType.simpleString()


def _schema(found: Any) -> StructType:
    return StructType.fromJson(msgspec.json.decode(found.json()))


def _buffer_type(function: Any) -> str:
    """The type of what is stored for an aggregate, column by column."""
    fields = _schema(function.aggBufferSchema()).fields
    types = [each.dataType.simpleString() for each in fields]
    if types == ["binary"]:  # an object of Spark's own; what comes out tells more
        return str(function.dataType().simpleString())
    if len(set(types)) == 1:
        return types[0] if len(types) == 1 else f"{len(types)} times {types[0]}"
    return ", ".join(f"{each.name} {of_type}" for each, of_type in zip(fields, types, strict=True))


def _span(micros: Any) -> str:
    number = int(micros)
    for unit, size in _UNITS:
        if number and number % size == 0:
            count = number // size
            return f"{count} {unit}" + ("" if count == 1 else "s")
    return f"{number} microseconds" if number else ""


def _every(length: str, slide: str, offset: str) -> str:
    every = "" if slide == length else f" every {slide}"
    return f"{length}{every}" + (f" from {offset} on" if offset else "")

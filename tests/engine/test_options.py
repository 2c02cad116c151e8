"""The options of a run: the same everywhere, each with an effect or refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from typer.testing import CliRunner

import tidegate as tg
from tidegate.cli.app import app
from tidegate.cli.run import run_command
from tidegate.engine.options import RunOptions, default_of, description_of, settings_of
from tidegate.engine.run import run_pipeline
from tidegate.errors import InvalidConfig

DEFAULTS = RunOptions()
NOT_OPTIONS = {"self", "root", "spark", "stop", "file", "pipeline", "as_json"}
# Each with a value that is not its default and has an effect.
GIVEN: dict[str, Any] = {
    "checkpoint_interval": "1s",
    "min_pause": "2s",
    "checkpoint_timeout": "3s",
    "tolerable_failures": 4,
    "max_concurrent": 5,
    "retain": "6",
    "full_snapshots": True,
    "unaligned_after": "700ms",
    "max_inflight": "8MB",
    "checkpoint": tg.CheckpointConfig(interval_ms=9),
    "max_backlog": "10MB",
    "max_backlog_segments": 11,
    "max_watermark_drift": "16m",
    "commit_timeout": "12s",
    "available_now": True,
    "up_to": "/other@ckpt-000042",
    "take_over": True,
    "work": "/work",
    "restarts": 13,
    "restart_pause": "14s",
    "chain": False,
    "history_age": "2d",
    "history_count": 77,
    "fsync": False,
    "rename": {"before": "middle"},
    "allow_dropped_state": ["gone"],
    "instance": "left",
    "stages": ["middle", "shown"],
    "instances": 3,
    "coordination": "zk://127.0.0.1:1/x",
    "grace": "16s",
    "lease": "17s",
    "metrics_port": 9464,
    "metrics_host": "0.0.0.0",
    "traces": "http://127.0.0.1:4318",
    "master": "spark://head:7077",
    "conf": {"spark.x": "15"},
}
ON_TIMEOUT = tg.AlignmentConfig(unaligned="on_timeout", timeout_ms=30_000)
NOWHERE: Any = object()


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name not in NOT_OPTIONS}


def flat(*, has_stage: bool = True) -> tg.Pipeline:
    pipeline = tg.Pipeline("flat")

    @pipeline.source
    def rows() -> None: ...

    if has_stage:

        @pipeline.stage
        def middle(rows: Any) -> Any:
            return rows

    @pipeline.sink(tg.Console(), inputs=["middle" if has_stage else "rows"])
    def shown(read: Any) -> Any:
        return read

    return pipeline


def meeting() -> tg.Pipeline:
    """Two sources that meet in a sink, one of them after a stage."""
    pipeline = tg.Pipeline("meeting")

    @pipeline.source
    def a() -> None: ...

    @pipeline.source
    def b() -> None: ...

    @pipeline.stage
    def middle(a: Any) -> Any:
        return a

    @pipeline.sink(tg.Console())
    def shown(middle: Any, b: Any) -> Any:
        return middle.union(b)

    return pipeline


# -- the same everywhere ----------------------------------------------------------------------------


def test_the_keywords_of_a_run_are_its_options_with_their_types_and_defaults() -> None:
    found = parameters(tg.Pipeline.run)
    assert list(found) == list(RunOptions.__struct_fields__) == list(GIVEN)
    assert {name: each.default for name, each in found.items()} == msgspec.structs.asdict(DEFAULTS)
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in found.values())
    names = {"SparkSession": Any, "threading": __import__("threading"), "CheckpointConfig": tg.CheckpointConfig}
    hints = get_type_hints(tg.Pipeline.run, localns=names)
    assert {name: hints[name] for name in found} == get_type_hints(RunOptions)


def test_every_keyword_of_a_run_is_told_with_the_default_that_a_none_stands_for() -> None:
    said = inspect.getdoc(tg.Pipeline.run) or ""
    lines = {name: line for line in said.split(":param ") for name in (line.partition(":")[0],)}
    assert lines.keys() >= {*GIVEN, "root", "spark", "stop"}
    for name, value in msgspec.structs.asdict(DEFAULTS).items():
        if value is None and (default := default_of(name)):
            assert f"({default})" in lines[name]


def test_the_options_of_the_command_are_those_of_a_run_but_for_the_config_that_holds_several() -> None:
    found = parameters(run_command)
    assert list(found) == [name for name in RunOptions.__struct_fields__ if name != "checkpoint"]
    hints, wanted = get_type_hints(run_command), get_type_hints(RunOptions)
    for name, each in found.items():
        if name in ("conf", "rename", "stages"):  # KEY=VALUE, repeated; A,B
            continue
        assert each.default == getattr(DEFAULTS, name), name
        assert hints[name] == (str | None if name == "retain" else wanted[name]), name
        assert description_of(name).endswith(".")


def test_a_keyword_reaches_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reached: dict[str, Any] = {}
    monkeypatch.setattr("tidegate.engine.run.run_pipeline", lambda *_, **options: reached.update(options))
    flat().run(tmp_path, **GIVEN)
    assert reached == {**GIVEN, "stop": None}


def test_an_option_of_the_command_reaches_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reached: dict[str, Any] = {}
    monkeypatch.setattr("tidegate.engine.run.run_pipeline", lambda *_, **options: reached.update(options))
    file = tmp_path / "flat.py"
    file.write_text("import tidegate as tg\npipeline = tg.Pipeline('flat')\n", encoding="utf-8")
    given = {name: value for name, value in GIVEN.items() if name != "checkpoint"}
    arguments = ["run", str(file), "--root", str(tmp_path / "root"), "--no-fsync", "--no-chain", "--conf", "spark.x=15"]
    arguments += ["--rename", "before=middle", "--allow-dropped-state", "gone"]
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif name not in ("fsync", "chain", "conf", "rename", "allow_dropped_state"):
            arguments += [option, ",".join(value) if name == "stages" else str(value)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert {name: value for name, value in reached.items() if name not in ("view", "on_step")} == given


def test_what_holds_by_default_is_what_options_say_it_is() -> None:
    said: dict[str, Any] = {name: default_of(name) for name in GIVEN if getattr(DEFAULTS, name) is None}
    without = ("unaligned_after", "max_watermark_drift", "instance", "coordination", "metrics_port", "traces", "master")
    for name in without:
        assert said.pop(name) == ""
    said |= {name: int(said[name]) for name in ("tolerable_failures", "max_concurrent")}
    assert settings_of({**said, "max_inflight": None}).config() == DEFAULTS.config() == tg.CheckpointConfig()
    in_flight = RunOptions(unaligned_after="1s", max_inflight=said["max_inflight"]).config().alignment
    assert in_flight.max_inflight_bytes == tg.AlignmentConfig().max_inflight_bytes


def test_every_knob_of_a_checkpoint_has_an_option() -> None:
    without = tg.CheckpointConfig()
    given = settings_of({name: value for name, value in GIVEN.items() if name not in ("checkpoint", "up_to")}).config()
    of_time = settings_of({"retain": "1h"}).config()
    for name in tg.CheckpointConfig.__struct_fields__:
        changed = of_time if name == "retain_ms" else given
        assert getattr(changed, name) != getattr(without, name), name
    for name in tg.AlignmentConfig.__struct_fields__:
        assert getattr(given.alignment, name) != getattr(without.alignment, name), name


def test_what_is_given_takes_the_place_of_what_the_config_says_and_leaves_the_rest() -> None:
    config = tg.CheckpointConfig(interval_ms=300, max_retained=7, incremental=False, alignment=ON_TIMEOUT)
    assert RunOptions(checkpoint=config).config() == config
    assert RunOptions(checkpoint=config, checkpoint_interval="5s").config().interval_ms == 5_000
    assert RunOptions(checkpoint=config, retain="5").config().max_retained == 5
    assert RunOptions(checkpoint=config, retain=2).config().max_retained == 2
    given = RunOptions(checkpoint=config, retain="24h", unaligned_after="0s").config()
    assert (given.interval_ms, given.max_retained, given.retain_ms) == (300, 7, 86_400_000)
    assert (given.incremental, given.alignment) == (False, tg.AlignmentConfig(unaligned="always"))


# -- each with an effect ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_inflight": "1GB"}, "max_inflight is 1GB, which has no effect: every stage aligns; give unaligned_after"),
        (
            {"checkpoint": tg.CheckpointConfig(alignment=tg.AlignmentConfig(max_inflight_bytes=1 << 20))},
            "max_inflight is 1MB, which has no effect",
        ),
        (
            {"max_inflight": "0B", "unaligned_after": "1s"},
            "unaligned_after is given, which has no effect: max_inflight",
        ),
        (
            {"unaligned_after": "10m"},
            "unaligned_after is 10m, which has no effect: a checkpoint is aborted after 10m (checkpoint_timeout)",
        ),
        ({"unaligned_after": "31s", "checkpoint_timeout": "30s"}, "unaligned_after is 31s, which has no effect"),
        (
            {"checkpoint": tg.CheckpointConfig(alignment=ON_TIMEOUT), "checkpoint_timeout": "1s"},
            "unaligned_after is 30s, which has no effect",
        ),
        (
            {"checkpoint": tg.CheckpointConfig(alignment=tg.AlignmentConfig(timeout_ms=5))},
            "timeout_ms of the alignment is 5, which has no effect: unaligned is 'never'",
        ),
        (
            {"checkpoint": tg.CheckpointConfig(alignment=tg.AlignmentConfig(unaligned="always", timeout_ms=5))},
            "timeout_ms of the alignment is 5, which has no effect: unaligned is 'always'",
        ),
        ({"available_now": True, "up_to": "other"}, "available_now is given, which has no effect: the run reads up to"),
        ({"restarts": 0, "restart_pause": "5s"}, "restart_pause is 5s, which has no effect: restarts is 0"),
        ({"grace": "5s"}, "grace is given, which has no effect: it is for instances; name this one with instance"),
        ({"instances": 3}, "instances is given, which has no effect: it is for instances"),
        ({"stages": ["middle"]}, "stages is given, which has no effect: it is for instances"),
        ({"metrics_host": "::"}, "metrics_host is ::, which has no effect: no metrics_port is given; give one"),
    ],
)
def test_an_option_without_an_effect_is_refused_before_anything_is_changed(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        run_pipeline(flat(), tmp_path / "root", NOWHERE, **options)
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith("leave it out")
    assert list(tmp_path.iterdir()) == []


def test_falling_back_is_refused_where_no_stage_could(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="unaligned_after is given, which has no effect: the pipeline has no stage"):
        run_pipeline(flat(has_stage=False), tmp_path / "root", NOWHERE, unaligned_after="1s")
    assert list(tmp_path.iterdir()) == []
    settings_of({"unaligned_after": "1s"}).check_effect_on(flat().validated())


def test_a_drift_is_refused_where_nothing_could_have_one(tmp_path: Path) -> None:
    said = "max_watermark_drift is 10m, which has no effect: no stage of the pipeline has several inputs; leave it out"
    with pytest.raises(InvalidConfig, match=said):
        run_pipeline(flat(), tmp_path / "root", NOWHERE, max_watermark_drift="10m")
    assert list(tmp_path.iterdir()) == []
    stages, given = meeting().validated(), settings_of({"max_watermark_drift": "10m"})
    given.check_effect_on(stages)
    on_one_way: list[tuple[str, ...]] = [(), ("a",), ("a", "middle", "shown")]
    for own_time in on_one_way:
        with pytest.raises(InvalidConfig, match="no stage has several inputs with event time; call withWatermark in"):
            given.check_effect_on_time(stages, own_time)
        settings_of({}).check_effect_on_time(stages, own_time)
    for own_time in [("a", "b"), ("middle", "b")]:
        given.check_effect_on_time(stages, own_time)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rename": {"a": "b"}}, "rename a=b: the pipeline has no stage 'b' (it has: rows, middle, shown)"),
        ({"rename": {"rows": "middle"}}, "rename rows=middle: the pipeline still has a stage 'rows'"),
        ({"rename": {"a": "middle", "b": "middle"}}, "rename b=middle: 'a' was to become 'middle' too"),
        ({"allow_dropped_state": ["middle"]}, "allow_dropped_state is middle, which has no effect: the pipeline still"),
        ({"rename": {"a": "middle"}}, "rename is given, which has no effect: the root has no checkpoint"),
    ],
)
def test_what_is_said_of_a_change_that_cannot_be_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as refused:
        run_pipeline(flat(), tmp_path / "root", NOWHERE, **options)
    assert str(refused.value).startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"unaligned_after": "0s", "max_inflight": "1B"},
        {"unaligned_after": "9m"},
        {"min_pause": "1h", "max_concurrent": 2},
        {"restarts": 0},
        {"checkpoint": tg.CheckpointConfig(alignment=ON_TIMEOUT), "unaligned_after": "0s"},
        {"full_snapshots": True, "checkpoint": tg.CheckpointConfig(incremental=False)},
    ],
)
def test_what_has_an_effect_is_not_refused(options: dict[str, Any]) -> None:
    settings_of(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_pause": "soon"}, "min_pause is 'soon'"),
        ({"checkpoint_timeout": "0s"}, "checkpoint_timeout is '0s'; it must be at least 1ms, such as 10m"),
        ({"commit_timeout": "0s"}, "commit_timeout is '0s'; it must be at least 1ms, such as 10m"),
        ({"max_watermark_drift": "0s"}, "max_watermark_drift is '0s'; it must be at least 1ms, such as 10m"),
        ({"max_inflight": "much"}, "max_inflight is 'much'"),
        ({"instance": "a/b"}, "instance is 'a/b'; it is a name of letters, digits, - and _"),
        ({"instance": "a", "lease": "0s"}, "lease is '0s'; it must be at least 1ms, such as 10s"),
        ({"instance": "a", "up_to": "other"}, "up_to is for a run alone"),
        ({"instance": "a", "instances": 0}, "instances is 0; it must be at least 1"),
        ({"instance": "a", "coordination": "etcd://user:secret@host"}, "that is no address of what driver processes"),
        ({"instance": "a", "coordination": "zk://user:secret@"}, "the address of ZooKeeper has no servers"),
        ({"tolerable_failures": -1}, "tolerable_failures is -1; it must be at least 0"),
        ({"max_concurrent": 0}, "max_concurrent is 0; it must be at least 1"),
        ({"metrics_port": 65_536}, "metrics_port is 65536; a port is between 0 and 65535"),
        ({"traces": "localhost?key=secret"}, "traces is not the address of a collector"),
        ({"traces": "http://user:secret@localhost"}, "traces holds a name or a password"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        settings_of(options)
    assert str(refused.value).startswith(said)
    assert "secret" not in str(refused.value)


def test_an_instance_asks_only_for_stages_that_there_are() -> None:
    settings = settings_of({"instance": "a", "stages": ["middle", "gone"]})
    with pytest.raises(InvalidConfig, match="stages is 'gone'; the pipeline has rows, middle, shown"):
        settings.check_effect_on(flat().validated())

from __future__ import annotations

import re

import pytest

from tidegate import errors
from tidegate.errors import (
    BarrierConflict,
    BucketUnfit,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointInProgress,
    CheckpointNotVisible,
    CheckpointsFailed,
    ConflictingRows,
    CoordinationUnavailable,
    DamagedCheckpoint,
    DamagedLog,
    DataLost,
    Fenced,
    ForeignRoot,
    ForeignTable,
    InstanceFailed,
    InvalidConfig,
    InvalidPipeline,
    InvalidRows,
    InvariantViolation,
    MaybeWritten,
    NoCheckpointInProgress,
    NoCommonPosition,
    NoRoot,
    NotConsumed,
    NotRunning,
    NotWritten,
    PipelineChanged,
    ProtocolViolation,
    RecoveryRefused,
    RequestFailed,
    RootInUse,
    SessionLost,
    SinkFailed,
    SparkLost,
    StageFailed,
    StoreUnavailable,
    Superseded,
    TablePutBack,
    TidegateError,
    UnknownCheckpoint,
    UnknownInput,
    UnknownState,
    first_line,
)

PARENTS: dict[type[TidegateError], type[Exception]] = {
    TidegateError: Exception,
    InvalidConfig: TidegateError,
    InvalidPipeline: TidegateError,
    InvalidRows: TidegateError,
    NotConsumed: TidegateError,
    RootInUse: TidegateError,
    NoRoot: TidegateError,
    BucketUnfit: NoRoot,
    ForeignRoot: TidegateError,
    PipelineChanged: TidegateError,
    RecoveryRefused: TidegateError,
    NotRunning: TidegateError,
    RequestFailed: TidegateError,
    UnknownCheckpoint: TidegateError,
    UnknownState: TidegateError,
    NoCommonPosition: TidegateError,
    CheckpointNotVisible: TidegateError,
    StageFailed: TidegateError,
    DataLost: StageFailed,
    InstanceFailed: TidegateError,
    SparkLost: TidegateError,
    CheckpointsFailed: TidegateError,
    SinkFailed: TidegateError,
    Fenced: SinkFailed,
    ForeignTable: SinkFailed,
    TablePutBack: SinkFailed,
    ConflictingRows: SinkFailed,
    CheckpointError: TidegateError,
    CheckpointInProgress: CheckpointError,
    NoCheckpointInProgress: CheckpointError,
    CheckpointIncomplete: CheckpointError,
    ProtocolViolation: TidegateError,
    UnknownInput: ProtocolViolation,
    BarrierConflict: ProtocolViolation,
    Superseded: TidegateError,
    DamagedLog: TidegateError,
    DamagedCheckpoint: TidegateError,
    StoreUnavailable: TidegateError,
    CoordinationUnavailable: TidegateError,
    NotWritten: CoordinationUnavailable,
    MaybeWritten: CoordinationUnavailable,
    SessionLost: CoordinationUnavailable,
    InvariantViolation: TidegateError,
}


def drawn_tree() -> dict[str, str]:
    """Child → parent, as the docstring of the module draws it."""
    parents: dict[str, str] = {}
    path: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}([ │├└─]*)([A-Z]\w+)(\s|$)", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        above = [each for each in path if each < depth]
        parents[name] = path[max(above)] if above else "Exception"
        path = {each: path[each] for each in above} | {depth: name}
    return parents


def test_the_tree_is_the_one_that_the_docstring_draws() -> None:
    assert drawn_tree() == {kind.__name__: parent.__name__ for kind, parent in PARENTS.items()}


def test_every_error_of_the_module_is_in_the_tree() -> None:
    found = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert found == PARENTS.keys()
    assert {kind: kind.__base__ for kind in PARENTS} == PARENTS


def test_a_retry_helps_only_where_waiting_changes_something() -> None:
    helped = {kind for kind in PARENTS if kind.retry_helps}
    assert helped == {
        CheckpointInProgress,
        CheckpointNotVisible,
        CheckpointIncomplete,
        StoreUnavailable,
        CoordinationUnavailable,
        NotWritten,
        MaybeWritten,
        SessionLost,
        RootInUse,
        RequestFailed,
        StageFailed,
        InstanceFailed,
        SparkLost,
        CheckpointsFailed,
    }


def test_an_incomplete_checkpoint_says_which_stages_it_waits_for() -> None:
    error = CheckpointIncomplete(42, frozenset({"paid", "orders"}))
    assert error.missing == {"paid", "orders"}
    assert str(error) == "checkpoint 42 waits for 2 stage(s): orders, paid"


@pytest.mark.parametrize(("count", "has_more"), [(5, False), (6, True)])
def test_an_incomplete_checkpoint_names_no_more_than_five_stages(count: int, has_more: bool) -> None:
    error = CheckpointIncomplete(42, frozenset(f"stage{number}" for number in range(count)))
    assert f"waits for {count} stage(s): stage0, stage1, stage2, stage3, stage4" in str(error)
    assert str(error).endswith(", …") is has_more
    assert "stage5" not in str(error)
    assert len(error.missing) == count


def test_a_superseded_run_is_told_by_whom_and_that_nothing_is_lost() -> None:
    error = Superseded(3, 4)
    assert (error.own_generation, error.newer_generation) == (3, 4)
    assert "generation 3 was superseded by generation 4" in str(error)
    assert "nothing that it completed is lost" in str(error)


def test_an_error_carries_the_message_that_it_was_given() -> None:
    assert str(DamagedLog("slot 3 cannot be read")) == "slot 3 cannot be read"


def test_why_python_s_worker_could_not_start_is_told_in_one_line() -> None:
    said = (
        "Job aborted: Lost task 0.0 (localhost executor driver): org.apache.spark.SparkException: \n"
        "Error from python worker:\n  Traceback (most recent call last):\n    import typer\n"
        "  AttributeError: module 'inspect' has no attribute 'Parameter'\nPYTHONPATH was:\n  /x\n\tat org.apache\n"
    )
    assert first_line(Exception(said)) == (
        "Job aborted: Lost task 0.0 (localhost executor driver): org.apache.spark.SparkException: Python's worker "
        "could not start: AttributeError: module 'inspect' has no attribute 'Parameter'"
    )
    assert first_line(Exception("it failed\n\tat org.apache")) == "it failed"

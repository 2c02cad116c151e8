from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidegate
from tidegate.errors import InvalidConfig
from tidegate.protocol.config import AlignmentConfig, CheckpointConfig, as_ms, size_as_text, size_in_bytes, time_as_text

# Each knob with the least that it may be.
CHECKPOINT_LEAST = {
    "interval_ms": 1,
    "min_pause_ms": 0,
    "timeout_ms": 1,
    "tolerable_failures": 0,
    "max_concurrent": 1,
    "max_retained": 1,
    "retain_ms": 0,
}
ALIGNMENT_LEAST = {"timeout_ms": 0, "max_inflight_bytes": 0}


@pytest.mark.parametrize(("name", "least"), CHECKPOINT_LEAST.items())
def test_a_checkpoint_setting_below_its_least_is_refused_by_name(name: str, least: int) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{name} is {least - 1}; it must be at least {least}$"):
        msgspec.structs.replace(CheckpointConfig(), **{name: least - 1})
    assert getattr(msgspec.structs.replace(CheckpointConfig(), **{name: least}), name) == least


@pytest.mark.parametrize(("name", "least"), ALIGNMENT_LEAST.items())
def test_an_alignment_setting_below_its_least_is_refused_by_name(name: str, least: int) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{name} is {least - 1}; it must be at least {least}$"):
        msgspec.structs.replace(AlignmentConfig(), **{name: least - 1})
    assert getattr(msgspec.structs.replace(AlignmentConfig(), **{name: least}), name) == least


def test_every_number_among_the_settings_has_a_least() -> None:
    numbers = {field.name for field in msgspec.structs.fields(CheckpointConfig) if type(field.default) is int}
    assert numbers == CHECKPOINT_LEAST.keys()
    numbers = {field.name for field in msgspec.structs.fields(AlignmentConfig) if type(field.default) is int}
    assert numbers == ALIGNMENT_LEAST.keys()


def test_a_setting_that_is_read_from_a_file_is_checked_too() -> None:
    with pytest.raises(InvalidConfig, match="max_retained"):
        msgspec.json.decode(b'{"max_retained":0}', type=CheckpointConfig)
    with pytest.raises(msgspec.ValidationError, match="sometimes"):
        msgspec.json.decode(b'{"alignment":{"unaligned":"sometimes"}}', type=CheckpointConfig)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="unaligned is 'sometimes', not one of never, on_timeout, always"):
        msgspec.structs.replace(AlignmentConfig(), unaligned="sometimes")


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="intervall_ms"):
        msgspec.json.decode(b'{"intervall_ms":1}', type=CheckpointConfig)
    with pytest.raises(msgspec.ValidationError, match="max_bytes"):
        msgspec.json.decode(b'{"alignment":{"max_bytes":1}}', type=CheckpointConfig)


@pytest.mark.parametrize("name", msgspec.structs.asdict(CheckpointConfig()))
def test_settings_cannot_be_changed_once_made(name: str) -> None:
    config = CheckpointConfig()
    with pytest.raises(AttributeError, match="immutable"):
        setattr(config, name, getattr(config, name))


def test_who_sets_nothing_gets_these_settings() -> None:
    assert msgspec.structs.asdict(CheckpointConfig()) == {
        "interval_ms": 10_000,
        "min_pause_ms": 0,
        "timeout_ms": 600_000,
        "tolerable_failures": 3,
        "max_concurrent": 1,
        "max_retained": 3,
        "retain_ms": 0,
        "incremental": True,
        "alignment": AlignmentConfig(unaligned="never", timeout_ms=10_000, max_inflight_bytes=2**30),
    }


def test_the_settings_are_part_of_the_public_names() -> None:
    assert tidegate.CheckpointConfig is CheckpointConfig
    assert tidegate.AlignmentConfig is AlignmentConfig


@given(st.integers(0, 1 << 50))
def test_what_is_written_of_a_time_or_a_size_is_read_as_the_same(number: int) -> None:
    assert as_ms("time", time_as_text(number)) == number
    assert size_in_bytes("size", size_as_text(number)) == number


def test_a_time_and_a_size_are_written_as_people_would() -> None:
    assert [time_as_text(each) for each in (0, 1, 1_500, 10_000, 600_000, 86_400_000)] == [
        "0s",
        "1ms",
        "1500ms",
        "10s",
        "10m",
        "1d",
    ]
    assert [size_as_text(each) for each in (0, 1, 1 << 10, 3 << 19, 1 << 30)] == ["0B", "1B", "1KB", "1536KB", "1GB"]

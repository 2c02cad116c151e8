"""What people are told of transfers that last."""

from __future__ import annotations

import logging

import pytest

from tidegate.cli.notices import notices
from tidegate.engine.status import RunStatus, now, transfer_now
from tidegate.storage.transfers import Progress, Transfers


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_lasts_for_a_second_is_told_with_all_of_its_kind() -> None:
    time = Time()
    transfers = Transfers(time)
    assert transfers.now() is None
    with transfers.under_way("uploading", 200, 3_000_000_000) as told:
        told(Progress(100, 200, 1_000_000_000))
        assert transfers.now() is None, "not yet"
        time.now_s += 1
        with transfers.under_way("uploading", 100, 400_000_000) as also, transfers.under_way("deleting", 5000):
            also(Progress(20, 100, 200_000_000))
            assert transfers.now() == ("uploading", Progress(120, 300, 1_200_000_000, 3_400_000_000))
            status = RunStatus("orders", 1, "host", now(), now(), "running", transfer=transfer_now(transfers))
            assert notices(status)[0].text == "uploading 120 of 300 files, 1.2 GB of 3.4 GB"
            time.now_s += 1
            assert transfers.now() == ("deleting", Progress(0, 5000))
            status = RunStatus("orders", 1, "host", now(), now(), "running", transfer=transfer_now(transfers))
            assert notices(status)[0].text == "deleting 0 of 5,000 files"
    assert transfers.now() is None


def test_a_start_logs_what_it_downloads_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    transfers = Transfers(time)
    with caplog.at_level(logging.INFO, "tidegate"), transfers.under_way("downloading", 100, 100_000_000) as told:
        for number in range(1, 101):
            time.now_s += 0.125
            told(Progress(number, 100, number * 1_000_000))
    assert [record.getMessage() for record in caplog.records] == [
        "downloading 8 of 100 files, 8.0 of 100.0 MB",
        "downloading 48 of 100 files, 48.0 of 100.0 MB",
        "downloading 88 of 100 files, 88.0 of 100.0 MB",
    ]


def test_how_much_there_is_to_download_is_left_out_where_nobody_knows(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    with caplog.at_level(logging.INFO, "tidegate"), Transfers(time).under_way("downloading", 3) as told:
        time.now_s += 2
        told(Progress(1, 3, 2_000_000))
    assert caplog.messages == ["downloading 1 of 3 files, 2.0 MB"]

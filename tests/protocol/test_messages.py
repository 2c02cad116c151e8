from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.search import search
from tidegate.protocol.messages import (
    MAX_U64,
    Barrier,
    Flag,
    Message,
    Segment,
    SegmentFile,
    Watermark,
    decode,
    encode,
)

u64 = st.integers(1, MAX_U64)
barriers = st.builds(Barrier, u64, u64, st.integers(0, 15).filter(lambda flags: flags & 10 != 10))
files = st.builds(SegmentFile, st.text(), st.integers(0, 2**50))
segments = st.builds(
    Segment,
    st.integers(1, 2**50),
    st.integers(0, 2**50),
    st.lists(files, max_size=4).map(tuple),
    st.one_of(st.none(), st.integers(-(2**62), 2**62)),
)
watermarks = st.builds(Watermark, st.integers(-(2**62), 2**62))
messages: st.SearchStrategy[Message] = st.one_of(barriers, segments, watermarks)


class TestBarrier:
    def test_the_largest_64_bit_id_and_epoch_survive_json(self) -> None:
        barrier = Barrier(2**64 - 1, 2**64 - 1, int(Flag.DRAIN))
        assert decode(encode(barrier)) == barrier

    @pytest.mark.parametrize("number", [0, -1, 2**64])
    def test_ids_and_epochs_outside_64_bits_are_refused(self, number: int) -> None:
        with pytest.raises(ValueError, match="checkpoint_id"):
            Barrier(number, 1)
        with pytest.raises(ValueError, match="epoch"):
            Barrier(1, number)

    @pytest.mark.parametrize("number", [0, -1, 2**64, 2**80])
    def test_ids_and_epochs_outside_64_bits_are_refused_when_decoded(self, number: int) -> None:
        with pytest.raises(msgspec.ValidationError, match="checkpoint_id"):
            decode(b'{"type":"barrier","checkpoint_id":%d,"epoch":1}' % number)
        with pytest.raises(msgspec.ValidationError, match="epoch"):
            decode(b'{"type":"barrier","checkpoint_id":1,"epoch":%d}' % number)

    def test_it_has_four_flags(self) -> None:
        assert {flag.name: int(flag) for flag in Flag if flag} == {
            "FULL_SNAPSHOT": 1,
            "DRAIN": 2,
            "CANCEL": 4,
            "UNALIGNED": 8,
        }

    @pytest.mark.parametrize("flag", [Flag.FULL_SNAPSHOT, Flag.DRAIN, Flag.CANCEL, Flag.UNALIGNED])
    def test_each_flag_is_told_apart(self, flag: Flag) -> None:
        barrier = Barrier(1, 1, int(flag))
        told = (barrier.is_full_snapshot, barrier.is_drain, barrier.is_cancel, barrier.is_unaligned)
        assert told == (
            flag is Flag.FULL_SNAPSHOT,
            flag is Flag.DRAIN,
            flag is Flag.CANCEL,
            flag is Flag.UNALIGNED,
        )

    def test_flags_combine(self) -> None:
        barrier = Barrier(1, 1, int(Flag.FULL_SNAPSHOT | Flag.DRAIN))
        assert barrier.is_full_snapshot
        assert barrier.is_drain
        assert not barrier.is_cancel
        assert not barrier.is_unaligned

    def test_no_flag_is_set_by_default(self) -> None:
        assert Barrier(1, 1).flags == 0

    @pytest.mark.parametrize("flags", [16, 32, 1 << 40, 17, -1])
    def test_unknown_flags_are_refused(self, flags: int) -> None:
        with pytest.raises(ValueError, match="unknown barrier flags"):
            Barrier(1, 1, flags)
        with pytest.raises(msgspec.ValidationError, match="unknown barrier flags"):
            decode(b'{"type":"barrier","checkpoint_id":1,"epoch":1,"flags":%d}' % flags)

    def test_a_drain_cannot_be_unaligned(self) -> None:
        both = int(Flag.DRAIN | Flag.UNALIGNED)
        with pytest.raises(ValueError, match="nothing in flight"):
            Barrier(1, 1, both)
        with pytest.raises(msgspec.ValidationError, match="nothing in flight"):
            decode(b'{"type":"barrier","checkpoint_id":1,"epoch":1,"flags":%d}' % both)

    def test_as_unaligned_keeps_everything_else(self) -> None:
        barrier = Barrier(7, 8, int(Flag.FULL_SNAPSHOT))
        assert barrier.as_unaligned() == Barrier(7, 8, int(Flag.FULL_SNAPSHOT | Flag.UNALIGNED))

    def test_as_cancel_keeps_the_id_and_epoch_alone(self) -> None:
        barrier = Barrier(7, 8, int(Flag.FULL_SNAPSHOT | Flag.DRAIN))
        assert barrier.as_cancel() == Barrier(7, 8, int(Flag.CANCEL))

    def test_barriers_of_one_checkpoint_agree_even_where_a_stage_fell_back(self) -> None:
        barrier = Barrier(7, 8, int(Flag.FULL_SNAPSHOT))
        assert barrier.agrees_with(barrier)
        assert barrier.agrees_with(barrier.as_unaligned())
        assert barrier.as_unaligned().agrees_with(barrier)

    @pytest.mark.parametrize(
        "other",
        [
            Barrier(9, 8, int(Flag.FULL_SNAPSHOT)),
            Barrier(7, 9, int(Flag.FULL_SNAPSHOT)),
            Barrier(7, 8),
            Barrier(7, 8, int(Flag.FULL_SNAPSHOT | Flag.DRAIN)),
            Barrier(7, 8, int(Flag.FULL_SNAPSHOT | Flag.CANCEL)),
        ],
        ids=["another id", "another epoch", "a flag less", "a flag more", "cancelled"],
    )
    def test_barriers_that_differ_in_anything_else_do_not_agree(self, other: Barrier) -> None:
        barrier = Barrier(7, 8, int(Flag.FULL_SNAPSHOT))
        assert not barrier.agrees_with(other)
        assert not other.agrees_with(barrier)


class TestSegment:
    @pytest.mark.parametrize(("sequence", "batch"), [(0, 0), (-1, 0), (1, -1)])
    def test_segments_are_numbered_from_1_and_batches_from_0(self, sequence: int, batch: int) -> None:
        with pytest.raises(ValueError, match="numbers start at 1 and 0"):
            Segment(sequence, batch, ())

    def test_its_size_is_that_of_its_files(self) -> None:
        assert Segment(1, 0, (SegmentFile("a", 3), SegmentFile("b", 4))).size_bytes == 7
        assert Segment(1, 0, ()).size_bytes == 0

    def test_one_that_was_stored_before_segments_had_a_watermark_is_read_and_written_as_it_was(self) -> None:
        stored = b'{"type":"segment","sequence":3,"batch":2,"files":[{"path":"a","size_bytes":3}]}'
        segment = decode(stored)
        assert segment == Segment(3, 2, (SegmentFile("a", 3),))
        assert encode(segment) == stored

    def test_no_file_has_less_than_nothing_in_it(self) -> None:
        with pytest.raises(ValueError, match="'a' has -1 bytes"):
            SegmentFile("a", -1)


class TestAMessageIsAValue:
    @pytest.mark.parametrize(
        ("message", "field"),
        [
            (Barrier(1, 1), "epoch"),
            (Segment(1, 0, ()), "batch"),
            (Watermark(1), "watermark_ms"),
            (SegmentFile("a", 1), "path"),
        ],
    )
    def test_it_cannot_be_changed(self, message: Message | SegmentFile, field: str) -> None:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(message, field, getattr(message, field))

    @given(messages)
    @search(100)
    def test_it_survives_json_unchanged_and_equal_ones_hash_alike(self, message: Message) -> None:
        copy = decode(encode(message))
        assert type(copy) is type(message)
        assert copy == message
        assert hash(copy) == hash(message)
        assert encode(copy) == encode(message)

    def test_messages_of_different_kinds_are_never_equal(self) -> None:
        assert len({Barrier(1, 1), Watermark(1), Segment(1, 1, ())}) == 3


class TestDecodingIsStrict:
    @pytest.mark.parametrize(
        "data",
        [
            b'{"type":"marker","checkpoint_id":1,"epoch":1}',
            b'{"checkpoint_id":1,"epoch":1}',
            b'{"type":"Barrier","checkpoint_id":1,"epoch":1}',
            b"[]",
            b"1",
            b"null",
        ],
    )
    def test_an_unknown_kind_is_refused(self, data: bytes) -> None:
        with pytest.raises(msgspec.ValidationError):
            decode(data)

    @pytest.mark.parametrize(
        "data",
        [
            b'{"type":"barrier","checkpoint_id":1,"epoch":1,"sender":"a"}',
            b'{"type":"watermark","watermark_ms":1,"idle":true}',
            b'{"type":"segment","sequence":1,"batch":0,"files":[],"rows":3}',
            b'{"type":"segment","sequence":1,"batch":0,"files":[{"path":"a","size_bytes":1,"rows":3}]}',
        ],
    )
    def test_an_unknown_field_is_refused(self, data: bytes) -> None:
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            decode(data)

    @pytest.mark.parametrize(
        "data",
        [
            b'{"type":"barrier","checkpoint_id":1}',
            b'{"type":"barrier","checkpoint_id":"1","epoch":1}',
            b'{"type":"barrier","checkpoint_id":1.5,"epoch":1}',
            b'{"type":"barrier","checkpoint_id":true,"epoch":1}',
            b'{"type":"barrier","checkpoint_id":1,"epoch":null}',
            b'{"type":"segment","sequence":0,"batch":0,"files":[]}',
            b'{"type":"segment","sequence":1,"batch":0}',
            b'{"type":"segment","sequence":1,"batch":0,"files":[{"path":"a","size_bytes":-4}]}',
            b'{"type":"watermark","watermark_ms":null}',
        ],
    )
    def test_a_missing_field_or_a_wrong_type_is_refused(self, data: bytes) -> None:
        with pytest.raises(msgspec.ValidationError):
            decode(data)

    @given(messages, st.data())
    @search(60)
    def test_a_message_that_was_cut_short_is_refused(self, message: Message, data: st.DataObject) -> None:
        encoded = encode(message)
        length = data.draw(st.integers(0, len(encoded) - 1))
        with pytest.raises(msgspec.ValidationError):
            decode(encoded[:length])

    def test_what_is_not_text_is_refused(self) -> None:
        data = b'{"type":"segment","sequence":1,"batch":0,"files":[{"path":"\xff","size_bytes":4}]}'
        with pytest.raises(msgspec.ValidationError):
            decode(data)

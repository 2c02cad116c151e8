"""What a stage makes of batches that Spark has committed. Spark is played."""

from __future__ import annotations

from pathlib import Path

from tests.spark.played import PlayedPipeline, played


def test_a_segment_that_one_of_two_sources_has_consumed_is_not_consumed(tmp_path: Path) -> None:
    """A join of an input with itself: the segment arrived after the second source had looked. There is no cut there:
    restored from it, one side of the join would lose the segment, or the other would see it twice."""

    def poll(pipeline: PlayedPipeline) -> None:
        for _ in range(5):
            pipeline.generation.poll()

    with played(tmp_path, times_read=2) as pipeline:
        segment = pipeline.played["rows"].run_batch()
        poll(pipeline)
        stage = pipeline.generation.stages["middle"]
        joined = pipeline.played["middle"]
        joined.consume(0, 0, segment, 1)
        joined.write(joined.output / "part-0.parquet", '{"logOffset":0}', "-")
        checkpoint_id = pipeline.generation.trigger()
        poll(pipeline)
        assert stage.batch == -1
        assert stage.channel.sequence == 0
        assert pipeline.generation.is_under_way(checkpoint_id)
        assert stage.aligner.waiting_for(checkpoint_id) == frozenset()
        assert list(stage.aligner.checkpoints) == [checkpoint_id]
        joined.consume(1, 0, segment, 1)
        joined.write(joined.output / "part-1.parquet", '{"logOffset":0}', '{"logOffset":0}')
        poll(pipeline)
        assert stage.batch == 1
        assert stage.channel.sequence == 2
        assert not stage.aligner.checkpoints
        assert stage.lag == 0

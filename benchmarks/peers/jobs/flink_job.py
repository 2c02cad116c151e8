"""The same work in Flink SQL, through PyFlink's Table API. Runs until it is killed."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.peers.job import COUNTS, DELAY_S, WINDOW_S, Job, read_job


def settings(job: Job) -> dict[str, str]:
    given = {
        "rest.address": "localhost",
        "rest.bind-address": "localhost",
        "rest.bind-port": str(job.port),
        "parallelism.default": str(job.cores),
        "taskmanager.numberOfTaskSlots": str(job.cores),
        "taskmanager.memory.managed.size": "512m",
        "state.backend.type": "rocksdb",
        "execution.checkpointing.dir": f"file://{job.state}/checkpoints",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.interval": f"{job.checkpoint_s} s",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "web.checkpoints.history": "1000",
        "table.local-time-zone": "UTC",
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": f"{job.checkpoint_s} s",
        "table.exec.mini-batch.size": "100000",
        "table.optimizer.agg-phase-strategy": "TWO_PHASE",
        # A reader without a file must not hold back the watermark of the other.
        "table.exec.source.idle-timeout": "1 s",
        **job.settings,
    }
    if job.restore:
        given["execution.state-recovery.path"] = job.restore
    return given


def table(name: str, columns: str, path: str, form: str, *more: str) -> str:
    options = (f"'connector'='filesystem', 'path'='file://{path}', 'format'='{form}'", *more)
    return f"CREATE TABLE {name} ({columns}) WITH ({', '.join(options)})"


def rolled(job: Job) -> tuple[str, str]:
    """So that a checkpoint shows rows, as those of the others do; Parquet files are rolled at checkpoints anyway."""
    every = f"{job.checkpoint_s} s"
    return (
        f"'sink.rolling-policy.rollover-interval'='{every}'",
        f"'sink.rolling-policy.check-interval'='{every}'",
    )


def insert_counts(tables: Any, job: Job) -> Any:
    tables.execute_sql(table("counts", "`key` BIGINT, n BIGINT", job.table("counts"), "debezium-json", *rolled(job)))
    return tables.execute_sql("INSERT INTO counts SELECT `key`, COUNT(*) FROM orders GROUP BY `key`")


def insert_chain(tables: Any, job: Job) -> Any:
    tables.execute_sql(
        "CREATE VIEW priced AS SELECT *, ROUND(amount * 1.19, 2) AS price FROM orders WHERE id % 10 <> 9"
    )
    tables.execute_sql(
        "CREATE VIEW banded AS SELECT *, CASE WHEN price > 500 THEN 'high' ELSE 'low' END AS band FROM priced"
    )
    paid = "id BIGINT, country STRING, ts TIMESTAMP_LTZ(3), price DOUBLE, band STRING"
    tables.execute_sql(table("paid", paid, job.table("paid"), "parquet"))
    totals = "country STRING, band STRING, revenue DOUBLE, orders BIGINT"
    tables.execute_sql(table("totals", totals, job.table("totals"), "parquet"))
    both = tables.create_statement_set()
    both.add_insert_sql("INSERT INTO paid SELECT id, country, ts, price, band FROM banded")
    both.add_insert_sql(
        "INSERT INTO totals SELECT country, band, SUM(price), COUNT(*) FROM "
        f"TABLE(TUMBLE(TABLE banded, DESCRIPTOR(ts), INTERVAL '{WINDOW_S}' SECONDS)) "
        "GROUP BY window_start, window_end, country, band"
    )
    return both.execute()


def main() -> None:
    job = read_job()
    api = importlib.import_module("pyflink.table")
    configuration = importlib.import_module("pyflink.common").Configuration()
    for key, value in settings(job).items():
        configuration.set_string(key, value)
    environment = api.EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    tables = api.TableEnvironment.create(environment)
    columns = "id BIGINT, `key` BIGINT, country STRING, amount DOUBLE, ts TIMESTAMP_LTZ(3)"
    if job.work != COUNTS:
        columns += f", WATERMARK FOR ts AS ts - INTERVAL '{DELAY_S // 86_400}' DAY"
    tables.execute_sql(table("orders", columns, job.input, "parquet", "'source.monitor-interval'='100 ms'"))
    (insert_counts if job.work == COUNTS else insert_chain)(tables, job).wait()


if __name__ == "__main__":
    main()

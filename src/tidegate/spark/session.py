"""Spark sessions: the user's own is used where given and never changed."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession
from pyspark.sql.udf import UserDefinedFunction
from pyspark.sql.udtf import UserDefinedTableFunction

from tidegate.errors import InvalidConfig, SparkLost, first_line
from tidegate.sinks.sessions import FOR_TABLES, PARTITIONS, derived_session
from tidegate.spark.filelog import NEVER_COMPACT
from tidegate.spark.jvm import java_class
from tidegate.spark.masters import HERE, MASTER
from tidegate.spark.modules import give_modules
from tidegate.spark.spark_log import keep_short
from tidegate.spark.versions import check_spark
from tidegate.storage.mounted import is_local

# How long a JVM that was killed takes to be seen as gone.
_DYING_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05
_ANSWERS_IN_S: Final = 2.0
_py4j_errors: Any = importlib.import_module("py4j.protocol")  # it has no types
_OLDEST_JAVA: Final = 17
_GET_JAVA: Final = (
    "It needs Java 17 or 21. What to do: install one (apt-get install openjdk-17-jre-headless, or brew install "
    "openjdk@17, or conda install openjdk=17), and let JAVA_HOME name its folder"
)
_LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
_STATE: Final = "spark.sql.streaming.stateStore"
_WITH_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

_PATHS: Final = {
    **dict.fromkeys(
        (
            "spark.jars",
            "spark.files",
            "spark.archives",
            "spark.submit.pyFiles",
            "spark.jars.ivy",
            "spark.jars.ivySettings",
            "spark.local.dir",
            "spark.sql.warehouse.dir",
            "spark.eventLog.dir",
        ),
        ",",
    ),
    **dict.fromkeys(("spark.driver.extraClassPath", "spark.driver.extraLibraryPath"), os.pathsep),
}
"""Settings that name files of this machine, and what stands between several."""
_VARIABLES: Final = ("PATH", "PYTHONPATH", "JAVA_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR")
"""Of the environment, what names folders by which the JVM and its workers are started."""

_STREAMING: Final = {
    # State as immutable files, a change log per batch, and names that are unique per batch.
    f"{_STATE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STATE}.checkpointFormatVersion": "2",
    # The format that filelog.py knows.
    "spark.sql.streaming.offsetLog.formatVersion": "1",
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "false",
    # One writer per folder is what a generation guarantees, so plain renames are safe, and 3 to 5 times cheaper.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.fileSink.log.compactInterval": str(NEVER_COMPACT),
    "spark.sql.streaming.numRecentProgressUpdates": "4",
    # A batch is looked at, and a snapshot of it is taken, before Spark deletes its entries.
    "spark.sql.streaming.minBatchesToRetain": "100",
    # How soon an idle query looks again; at Spark's 10 ms five idle queries take half a core.
    "spark.sql.streaming.pollingDelay": "20ms",
    # A query that does not stop must not keep a run from stopping; whatever it still writes is of an old generation.
    "spark.sql.streaming.stopTimeout": "30s",
    # A manifest holds the SHA-256 of every file that a checkpoint needs; a second checksum file for each is not needed.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    **FOR_TABLES,
}

# So many times the versions that it retains are to be there too, before it deletes any.
_KEEPS_STATE: Final = ("spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint", "1e9")

# Only for stages that read gates: a user's own file source keeps its log, and is read, as the user has it.
_GATE_READING: Final = {
    "spark.sql.streaming.fileSource.log.compactInterval": str(NEVER_COMPACT),
    # A gate is nothing but such a log.
    "spark.sql.streaming.fileStreamSink.ignoreMetadata": "false",
    # What a channel holds is rows that were handed on, never to be skipped.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}


def existing_session() -> SparkSession | None:
    """The session that this thread or else the process has. None is active in a thread that was given none, but all
    threads of a process share one SparkContext, and what a builder sets would change the session that is there."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    context = SparkContext._active_spark_context
    return None if context is None else SparkSession(context)  # the default one; only where there is none, a new one


def master_of(settings: Mapping[str, str], given: SparkSession | None) -> str:
    """Where Spark does its work: in the session that there is, or in one that is made with these settings. That of a
    program which spark-submit has started is where that was told to."""
    session = given or existing_session()
    if session is not None:
        return str(session.sparkContext.master)
    if MASTER in settings:
        return settings[MASTER]
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()
        return SparkConf().get(MASTER) or HERE
    return HERE


def check_settings(settings: Mapping[str, str], given: SparkSession | None) -> None:
    """Refuse settings for a session of our own that would have no effect."""
    if settings and (given or existing_session()) is not None:
        raise InvalidConfig(
            f"there is a Spark session already: {min(settings)} cannot be set any more; set it where that one is made"
        )
    for key in settings:
        if not key.startswith("spark."):
            raise InvalidConfig(f"{key!r} is no setting of Spark's: those start with spark.")
        if key in _STREAMING:
            raise InvalidConfig(f"{key} is set by Tidegate for its stages; leave it out")


def in_place(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings whose relative paths name what they name here, also for a process that works in another folder."""
    return {key: _absolute(value, _PATHS[key]) if key in _PATHS else value for key, value in settings.items()}


def _absolute(paths: str, separator: str) -> str:
    return separator.join(
        each if not each.strip() or _WITH_SCHEME.match(each.strip()) else str(Path(each.strip()).absolute())
        for each in paths.split(separator)
    )


def own_session(
    name: str,
    log: Path,
    settings: Mapping[str, str] | None = None,
    folder: Path | None = None,
    launched: Callable[[], object] = lambda: None,
) -> SparkSession:
    """A session on this machine, with settings that suit small ones, unless `settings` say another `MASTER`. Spark's
    own messages go to the file `log`.

    `settings` come on top. Its process works in the `folder`: relative paths lead there, and executors of a cluster get
    the modules that are in it. A session that is there already is used as it is, and not ours to change. `launched` is
    called when Spark's process is there, and the session is yet to be made.
    """
    existing = existing_session()
    if existing is not None:
        return existing
    _let_py4j_log_as_itself()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if os.sep in os.environ["PYSPARK_PYTHON"]:
        os.environ["PYSPARK_PYTHON"] = _absolute(os.environ["PYSPARK_PYTHON"], os.pathsep)
    settings = settings or {}
    is_here = is_local(master_of(settings, None))
    if is_here:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    log.parent.mkdir(parents=True, exist_ok=True)
    # By the environment, not by options of the JVM: those cannot hold every path.
    os.environ["LOG4J_CONFIGURATION_FILE"] = str(_LOG_SETTINGS)
    builder = (
        SparkSession.builder.master(master_of(settings, None))
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # Hadoop has a umask of its own, 022, by which it changes the mode of all that it makes.
        .config("spark.hadoop.fs.permissions.umask-mode", f"{_umask():04o}")
    )
    if is_here:
        builder = builder.config(PARTITIONS, str(os.cpu_count() or 2))
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with _stderr_to(log), _handlers_kept(), _launched_in(folder or Path.cwd()), _told_when_launched(launched):
            session = builder.getOrCreate()
        keep_short(log)
    except PySparkException as error:
        raise InvalidConfig(
            f"Spark could not be started: {first_line(error)} It needs Java 17 or 21, by JAVA_HOME or on the PATH; its "
            f"own messages are in {log}"
        ) from error
    except Exception as error:
        if not is_of_the_connection(error):
            raise
        raise SparkLost(f"Spark's process died while it was starting; its own messages are in {log}") from error
    accumulators: Any = session.sparkContext._accumulatorServer
    accumulators.handle_error = lambda *_: None  # it would print a trace when the JVM dies
    forget_yarn(session)
    if not is_here:
        give_modules(session, folder or Path.cwd(), log.with_name(f"{log.stem}-modules.zip"))
    return session


# What reads Hadoop's settings anew when it is loaded: first, so that what is left out stays so.
_RELOADING: Final = (
    "org.apache.hadoop.mapred.JobConf",
    "org.apache.hadoop.yarn.conf.YarnConfiguration",
    "org.apache.hadoop.hdfs.HdfsConfiguration",
)


def forget_yarn(session: SparkSession) -> None:
    """Leave the settings of YARN out of Hadoop's, of a session that is ours and runs without it.

    They are half of them all, and all are copied, compressed and read again many times for each batch: of small ones
    that is a quarter of the work.
    """
    context: Any = session.sparkContext
    if not is_local(context.master):
        return
    classes = java_class(session, "java.lang.Class")
    for name in _RELOADING:
        with suppress(_py4j_errors.Py4JJavaError):  # not every Spark has it
            classes.forName(name)
    settings = context._jsc.hadoopConfiguration()
    set_by_user = {key for key, _ in context.getConf().getAll()}
    for name in settings.getValByRegex(r"^yarn\.").keySet().toString()[1:-1].split(", "):
        if name and f"spark.hadoop.{name}" not in set_by_user:
            settings.unset(name)


def _umask() -> int:
    """The user's. It can be read only by setting it: what another thread makes in that instant is private."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def check_java() -> None:
    """Refuse where Spark's launcher would find no Java, or one that is too old; by its own rules, but at once."""
    configured = Path(os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home()) / "conf")
    if (configured / "spark-env.sh").exists():
        return  # it may say where Java is
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = (
            f"JAVA_HOME is {home}, which has no bin/java" if home else "JAVA_HOME is not set, nor is java on the PATH"
        )
        raise InvalidConfig(f"Spark finds no Java: {where}. {_GET_JAVA}")
    version = _java_version(Path(found))
    if version is not None and version < _OLDEST_JAVA:
        raise InvalidConfig(f"Spark cannot run on {found}, which is Java {version}. {_GET_JAVA}")


def _java_version(java: Path) -> int | None:
    """As the file beside it says; None where there is none: then Spark's launcher will tell."""
    try:
        release = (java.resolve().parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    said = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    return None if said is None else int(said[1])


def _let_py4j_log_as_itself() -> None:
    """It logs a connection that breaks, with a trace, as if it were the program: that makes Python set up logging to
    stderr for all of it. What is wrong is told anyway, by an exception."""
    py4j: Any = importlib.import_module("py4j.java_gateway")
    py4j.logging = py4j.logger


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """What the JVM says, of its own and by its log (warnings at its start, a dying driver's traces), goes to the log.

    It inherits its stderr from us when it is started, so ours leads there for that while.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """PySpark takes Ctrl-C for itself when it starts a session in the main thread. Whoever has it keeps it."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _ignore_termination(also: Callable[[], object] | None) -> None:
    """In the new process: a SIGTERM does not end it, as Ctrl-C does not. Both may come to all processes of a group, as
    from `timeout` or systemd, and the run needs the JVM for its last checkpoint. It ends with the run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if also is not None:
        also()


@contextmanager
def _launched_in(folder: Path) -> Iterator[None]:
    """A JVM is started in this folder, and if its start comes to nothing, by Ctrl-C too, it is ended.

    PySpark would leave it behind: it removes the folder in which the JVM is about to say where it listens, and a JVM
    that cannot say so does not look any more whether this process lives. Nor does PySpark tell which process it is.
    """
    launching: Any = importlib.import_module("pyspark.java_gateway")
    before = launching.Popen
    launched: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            variables = options.get("env") or os.environ
            paths = {name: _absolute(variables[name], os.pathsep) for name in _VARIABLES if name in variables}
            options |= {"cwd": folder, "env": {**variables, **paths}}
            options["preexec_fn"] = partial(_ignore_termination, options.get("preexec_fn"))
            with _signals_later():  # or one would come between the start of the process and the note of it
                super().__init__(*arguments, **options)
                launched.append(self)

    launching.Popen = Noted
    try:
        yield
    except BaseException:
        for process in launched:
            process.kill()
            process.wait()
        if launched:
            _forget_spark()
        raise
    finally:
        launching.Popen = before


@contextmanager
def _told_when_launched(launched: Callable[[], object]) -> Iterator[None]:
    """PySpark launches its JVM and makes a session of it in one call."""
    contexts: Any = importlib.import_module("pyspark.core.context")
    launch = contexts.launch_gateway

    def launch_and_tell(*arguments: Any, **options: Any) -> Any:
        gateway = launch(*arguments, **options)
        launched()
        return gateway

    contexts.launch_gateway = launch_and_tell
    try:
        yield
    finally:
        contexts.launch_gateway = launch


@contextmanager
def _signals_later() -> Iterator[None]:
    """Signals that would stop us come to their handlers at the end of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in noted:
            signal.raise_signal(each)


def _forget_spark() -> None:
    """Make PySpark forget its JVM, of which nothing can be used any more, and end that. The next session starts anew.

    A function of the user's that was made outside of stages remembers what stands for it in the JVM.
    """
    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    process = _process_of(gateway)
    if process is not None:
        process.kill()
        process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it could not shut the JVM down
        for stop in [each for each in (getattr(context, "stop", None), getattr(gateway, "shutdown", None)) if each]:
            with suppress(Exception):
                stop()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    for each in gc.get_objects():
        if isinstance(each, UserDefinedFunction):
            each._judf_placeholder = None
        elif isinstance(each, UserDefinedTableFunction):
            each._judtf_placeholder = None


def _process_of(gateway: Any) -> subprocess.Popen[bytes] | None:
    """The JVM's, if this process has started it. What a gateway itself does not have, it would ask the JVM for."""
    return None if gateway is None else vars(gateway).get("proc")


def scratch_folders(session: SparkSession) -> list[Path]:
    """Where Spark keeps what it shuffles and spills."""
    named = os.environ.get("SPARK_LOCAL_DIRS") or session.conf.get("spark.local.dir", None) or tempfile.gettempdir()
    return [Path(folder) for folder in named.split(",")]


def unload_state(session: SparkSession) -> None:
    """Let Spark's process close the state of queries that have ended, unless some still run in it.

    Spark does so within a minute or two. Until then its upkeep goes on in their folders, and makes those anew that were
    deleted meanwhile.
    """
    if session._jsparkSession.sharedState().activeStreamingQueries().isEmpty():
        stores = java_class(session, "org.apache.spark.sql.execution.streaming.state.StateStore$")
        getattr(stores, "MODULE$").stop()


class RunSession:
    """The session that a run works on: the user's, or one of our own, which is started anew when its JVM is gone."""

    def __init__(self, given: SparkSession | None, start: Callable[[], SparkSession]) -> None:
        """`start`: makes one of our own, where the user has none."""
        self._session = given or existing_session()
        self._start = start
        self.is_given = self._session is not None
        # One that was started for a JVM that runs us cannot outlive it.
        self.can_restart = not self.is_given and "PYSPARK_GATEWAY_PORT" not in os.environ
        self._is_lost = False

    def check_can_start(self) -> None:
        """Refuse a PySpark of another version, and to start a session where there is no Java for it."""
        check_spark()
        if self._session is None and self.can_restart:
            check_java()

    @property
    def is_there(self) -> bool:
        return self._session is not None and not self._is_lost

    def started(self) -> SparkSession:
        """The session, which is started if it is not there or no longer."""
        if self._session is None:
            self._session = self._start()
        elif self._is_lost:
            _forget_spark()
            try:
                self._session = self._start()
            except InvalidConfig as error:  # it could be before
                raise SparkLost(str(error)) from error
            self._is_lost = False
        return self._session

    def give_up(self) -> None:
        """Something in it cannot be stopped. One of our own is ended, and the next start makes another."""
        if self._session is None or not self.can_restart or self._is_lost:
            return
        process = _process_of(self._session.sparkContext._gateway)
        if process is not None:
            process.kill()
            process.wait()
            self._is_lost = True

    def check(self, failed: BaseException) -> None:
        """Raise if the JVM is gone, or no longer has the session: what failed has failed because of that."""
        if self._session is None:
            return
        context = self._session.sparkContext
        deadline = time.monotonic() + (_DYING_S if is_of_the_connection(failed) else 0)
        while not _is_gone(context):
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_EVERY_S)
        self._is_lost = True
        raise SparkLost(
            "Spark's process is gone: it was killed, ran out of memory, or its session was stopped"
            + ("" if self.can_restart else "; the run cannot start another one in its place: start the program again")
        ) from failed


def is_of_the_connection(error: BaseException | None) -> bool:
    """Whether an error, or what has caused it, is of the connection to the JVM and not out of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # one may have been raised from itself
        seen.add(id(error))
        if isinstance(error, _py4j_errors.Py4JError) and not isinstance(error, _py4j_errors.Py4JJavaError):
            return True
        if isinstance(error, ConnectionError) and _raised_in(error).startswith("py4j."):
            return True
        error = error.__cause__ or error.__context__
    return False


def _raised_in(error: BaseException) -> str:
    """The module that an error comes from."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def _is_gone(context: SparkContext) -> bool:
    if context._jsc is None:
        return True
    gateway: Any = context._gateway
    process = _process_of(gateway)
    if process is not None and process.poll() is not None:
        return True
    listening = gateway.gateway_parameters
    try:
        # Not by a call: one to a JVM that hangs would not come back.
        with socket.create_connection((listening.address, listening.port), timeout=_ANSWERS_IN_S):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except _py4j_errors.Py4JError:
        return True


class StageSessions:
    """The two sessions that a pipeline's stages run on."""

    def __init__(self, session: SparkSession, *, keeps_state: bool = False) -> None:
        """`keeps_state`: Spark deletes no file of state: checkpoints refer to these where they lie."""
        check_spark(session.version, "Spark")  # SPARK_HOME may lead PySpark to another one than its own
        self.of_sources = derived_session(session)
        for key, value in _STREAMING.items():
            self.of_sources.conf.set(key, value)
        if keeps_state:
            self.of_sources.conf.set(*_KEEPS_STATE)
        self.of_stages = derived_session(self.of_sources)
        for key, value in _GATE_READING.items():
            self.of_stages.conf.set(key, value)

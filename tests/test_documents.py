"""Documents are true: their diagrams, commands and examples are checked."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pytest

from tests.cli.harness import live_run, seen, tidegate, wait_until
from tests.cli.strict import answered
from tests.operating_guide import commands_of, sections
from tests.s3_server import NONE_HERE, find_program
from tidegate.cli.answers import DemoAnswer, PlanAnswer
from tidegate.engine.control import Life
from tools import reference
from tools.diagrams import rendered

ROOT = Path(__file__).parents[1]

# What each command of README.md and the guides is tried with here, so that it ends soon. `./dev` itself is left to CI,
# which runs it in a fresh clone: here it would make an environment inside a test.
COMMANDS: dict[str, list[str] | None] = {
    "tidegate run orders.py --root state/orders --available-now": None,  # with the example, below
    "tidegate run orders.py --root state/orders": None,  # it runs for ever: tests/cli/test_live.py stops it
    "tidegate run orders.py --root state/orders --metrics-port 9464": None,  # tests/spark/test_metrics.py
    "tidegate run orders.py --root state/orders --traces http://127.0.0.1:4318": None,  # the same
    "tidegate stop --root state/orders": None,  # the same, where it stops it
    "tidegate restore --root state/orders --to 42": None,  # these ask and change things: tests/spark/test_restoring.py
    "tidegate restore --root state/orders --to 42 --dry-run": None,
    "tidegate restore --root state/orders --to 42 --yes": None,
    "tidegate plan orders.py --root state/orders": None,  # with the example, below
    "tidegate run orders_new.py --root state/new --up-to state/orders": None,  # the same
    "tidegate compare --root state/orders --with state/new": None,
    "tidegate demo": None,  # takes long, below
    "tidegate simulate --seeds 1000": ["tidegate", "simulate", "--seeds", "20"],
    "./dev demo": None,
    "tidegate simulate --whole --seeds 200": ["tidegate", "simulate", "--whole", "--seeds", "4"],
    "tidegate simulate --together --seeds 200": ["tidegate", "simulate", "--together", "--seeds", "4"],
    "./dev simulate --seeds 1000": ["tidegate", "simulate", "--seeds", "20"],
    "./dev simulate --seeds 5000": ["tidegate", "simulate", "--seeds", "20"],
    "./dev soak": ["tidegate", "simulate", "--seeds", "1"],
    "./dev kafka": None,  # fetches jars
    "./dev matrix": None,  # makes environments: tests/test_matrix.py
    "./dev bench protocol": ["python", "-m", "benchmarks", "protocol", "--help"],
    "./dev bench spark": ["python", "-m", "benchmarks", "spark", "--help"],
    "./dev bench unaligned": ["python", "-m", "benchmarks", "unaligned", "--help"],
    "./dev bench dashboard": ["python", "-m", "benchmarks", "dashboard", "--help"],
    # These run until they are stopped: tests/dashboard/test_command.py
    "tidegate dashboard --root state/orders": None,
    "tidegate dashboard --root state/orders --allow-actions --token-file dashboard.token": None,
    "./dev bench bucket": ["python", "-m", "benchmarks", "bucket", "--help"],
    "./dev soak --drivers": ["python", "-m", "tests.spark.soak_drivers", "--help"],
    "./dev soak --cluster": ["python", "-m", "tests.spark.soak_cluster", "--help"],
    # tests/test_clusters_guide.py
    "tidegate run orders.py --root s3://bucket/orders --master spark://head:7077": None,
    "tidegate run orders.py --root /shared/orders --master spark://head:7077 --available-now": None,
    "./dev soak --bucket": ["python", "-m", "tests.spark.soak_bucket", "--help"],
    "./dev bench scale": ["python", "-m", "benchmarks", "scale", "--help"],
    "./dev check": None,  # this very run
    "./dev test": None,
}

# These are run as they stand there, beside a run that is alive.
ON_A_ROOT = (
    "tidegate status --root state/orders",
    "tidegate checkpoint --root state/orders",
    "tidegate checkpoint --root state/orders --full",
    "tidegate cancel --root state/orders",
    "tidegate checkpoints --root state/orders",
    "tidegate checkpoints 42 --root state/orders",
    "tidegate checkpoints --root state/orders --summary",
    "tidegate history --root state/orders",
    "tidegate history --root state/orders --only aborts --only failures",
    "tidegate verify --root state/orders",
    "tidegate verify --root state/orders --quick",
    "tidegate graph orders.py",
    "tidegate graph --root state/orders",
    "tidegate checkpoints --root state/orders --json",
)


# These need what Spark has stored: they are run as they stand there, one after the other, where the example has run.
ON_WHAT_SPARK_HAS_STORED = (
    "tidegate inspect --root state/orders",
    "tidegate inspect latest --root state/orders --stage revenue",
    "tidegate inspect latest --root state/orders --stage revenue --where \"key.country = 'DE'\" --limit 5",
    "tidegate inspect latest --root state/orders --stage revenue --format csv --out revenue.csv",
    "tidegate inspect latest --root state/orders --stage revenue --format parquet --out revenue-state",
    "tidegate diff 2 latest --root state/orders --stage revenue",
    "tidegate verify --root state/orders --deep orders.py",
)

GUIDES = sorted((ROOT / "docs").glob("*.md"))


def read_by_users() -> str:
    """The front page and the guides, and what those who work on it read."""
    pages = (ROOT / "README.md", *GUIDES, ROOT / "CONTRIBUTING.md")
    return "\n".join(path.read_text(encoding="utf-8") for path in pages)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def documented_commands() -> set[str]:
    text = read_by_users()
    fenced = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in fenced for line in block.splitlines()]
    in_table = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return {line for line in [*lines, *in_table] if line.startswith(("./dev", "tidegate "))}


def test_every_command_in_the_documents_is_known_here() -> None:
    operating = {each for section in sections() for each in commands_of(section)}  # run by tests/test_operating.py
    # Run by tests/test_drivers_guide.py and tests/test_buckets_guide.py.
    apart = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("drivers", "buckets"))
    guided = re.findall(r"^tidegate .*$", apart, re.MULTILINE)
    assert documented_commands() == {*COMMANDS, *ON_A_ROOT, *ON_WHAT_SPARK_HAS_STORED, *operating, *guided}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the README works in: the example's file, and a root with 42 checkpoints and a run on it."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "orders.py").write_text(example(), encoding="utf-8")
    (folder / "state").mkdir()
    with live_run(folder / "played", checkpoints=42) as run:
        (folder / "state" / "orders").symlink_to(run.root)
        wait_until(lambda: seen(run.root) is Life.ALIVE)
        yield folder


@pytest.mark.parametrize("command", ON_A_ROOT)
def test_a_command_on_a_root_runs_as_the_readme_says(command: str, workplace: Path) -> None:
    done = tidegate(*shlex.split(command)[1:], cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_drawing_in_the_readme_is_what_the_command_draws(workplace: Path) -> None:
    drawing = tidegate("graph", "orders.py", cwd=workplace).stdout
    assert f"```text\n{drawing}```" in read_by_users()


def examples() -> list[str]:
    """The pipeline, and how its tables are read."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == 2
    return found


def example() -> str:
    return examples()[0]


@pytest.mark.parametrize("command", [command for command, tried in COMMANDS.items() if tried is not None])
def test_a_command_of_the_readme_runs(command: str) -> None:
    tried = COMMANDS[command]
    assert tried is not None
    program = str(Path(sys.executable).with_name(tried[0]))
    done = subprocess.run([program, *tried[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if command.startswith("./dev"):
        assert re.search(rf"^  {shlex.split(command)[1]}\b", dev_help(), re.MULTILINE)


def dev_help() -> str:
    done = subprocess.run([str(ROOT / "dev"), "help"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def check_the_guide_to_comparing(folder: Path) -> None:
    """What docs/comparing.md says, where the example of the front page has run."""
    changed = (folder / "orders.py").read_text(encoding="utf-8").replace('"lake/', '"trial/')
    (folder / "orders_new.py").write_text(changed, encoding="utf-8")
    (folder / "orders" / "3.json").write_text("{}", encoding="utf-8")  # what comes later is not read
    guide = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
    for command in re.findall(r"```sh\n(.*?)\n```", guide):
        done = tidegate(*shlex.split(command)[1:], cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    (table,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    assert done.stdout.splitlines()[1:] == table.splitlines()[1:]
    (shown,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    run = [sys.executable, "-c", shown]
    found = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert re.search(r"ckpt-\d+ ckpt-\d+ True \d+", found.stdout)


@pytest.mark.slow
@pytest.mark.spark
def test_the_example_of_the_readme_runs_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(example(), encoding="utf-8")
    (tmp_path / "orders").mkdir()
    rows = [
        {"id": each, "ts": f"2026-01-01T{each // 60:02d}:{each % 60:02d}:00Z", "country": "DE", "amount": each}
        for each in range(300)
    ]
    (tmp_path / "orders" / "1.json").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    command = "tidegate run orders.py --root state/orders --available-now"
    assert command in COMMANDS
    program, *arguments = shlex.split(command)
    run = [str(Path(sys.executable).with_name(program)), *arguments]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(deltalake.DeltaTable(tmp_path / "lake" / "large_orders").to_pyarrow_table()) == 200
    revenue = deltalake.DeltaTable(tmp_path / "lake" / "revenue").to_pyarrow_table().to_pylist()
    assert sum(row["amount"] for row in revenue) == sum(range(100, 294))
    read = subprocess.run(
        [sys.executable, "-c", examples()[1]], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert read.returncode == 0, read.stderr
    assert "ckpt-" in read.stdout
    assert "[200 rows x 4 columns]" in read.stdout
    check_what_is_planned(tmp_path)
    check_the_guide_to_looking_inside(tmp_path)
    check_the_guide_to_comparing(tmp_path)


def check_what_is_planned(folder: Path) -> None:
    (command,) = [each for each in COMMANDS if each.startswith("tidegate plan")]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parts[-1] != "__pycache__"}
    planned = tidegate(*shlex.split(command)[1:], cwd=folder)
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"a run goes on from ckpt-\d+\n", planned.stdout)
    assert "one query: orders, large\n" in planned.stdout or "nothing has changed" in planned.stdout
    renamed = (folder / "orders.py").read_text().replace("def revenue(", "def sales(")
    (folder / "renamed.py").write_text(renamed, encoding="utf-8")
    refused = tidegate("plan", "renamed.py", "--root", "state/orders", "--json", cwd=folder)
    answer = answered(refused.stdout)
    assert refused.returncode == 3
    assert isinstance(answer, PlanAnswer)
    assert answer.refused is not None
    assert "--rename revenue=sales" in answer.refused.message
    assert {path: path.stat().st_mtime_ns for path in before} == before


# In one process, because each would start Spark; with rows of a second run, so that there is something to compare.
LOOKING_INSIDE = """
import os, shlex, sys
from pathlib import Path
from tidegate.cli.app import app
from tidegate.cli.load import load_pipeline
from tidegate.storage.inspection import InspectedRoot

root = InspectedRoot(Path("state/orders"))
read = root.manifest(root.newest()).stages["orders"].cut
Path("orders/.2.json").write_text('{{"id": 300, "ts": "2026-01-01T05:00:00Z", "country": "DE", "amount": 300}}')
os.rename("orders/.2.json", "orders/2.json")
load_pipeline(Path("orders.py"), None, to_run=True).run(root="state/orders", available_now=True, retain=20)
(*_, before) = (each for each in root.retained() if root.manifest(each).stages["orders"].cut == read)
for command in {commands!r}:
    print("$", command, flush=True)
    app(shlex.split(command.replace("diff 2 ", f"diff {{before.checkpoint_id}} "))[1:], standalone_mode=False)
{example}
"""


def check_the_guide_to_looking_inside(folder: Path) -> None:
    """What docs/inspecting.md says, where the example of the front page has run."""
    guide = (ROOT / "docs" / "inspecting.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    program = LOOKING_INSIDE.format(commands=ON_WHAT_SPARK_HAS_STORED, example=shown)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.split("$ ")
    assert "revenue       0 aggregation           window(ts), country           6\n" in told[1]
    assert "2026-01-01 05:00:00  2026-01-01 05:01:00  DE           300" in told[2]
    assert len((folder / "revenue.csv").read_text(encoding="utf-8").splitlines()) == 7
    assert (folder / "revenue-state").is_dir()
    assert re.search(r"1 key added, \d+ removed, 0 changed, 5 unchanged\n\+ window .*T05:00:00.000Z", told[6])
    assert told[7].count(" would run: ") == 3
    assert "|count|" in told[7]


@pytest.mark.slow
@pytest.mark.spark
def test_the_demo_survives_its_kills_and_draws_a_picture(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("tidegate"))
    command = [program, "demo", "--files", "12", "--svg", str(tmp_path / "demo.svg"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("killed with SIGKILL") == 2
    assert "2 kills survived" in done.stderr
    assert "nothing lost, nothing twice" in done.stderr
    verdict = answered(done.stdout)
    assert isinstance(verdict, DemoAnswer)
    assert verdict.tables.keys() >= {"revenue"}
    assert all(each.found == each.expected > 0 for each in verdict.tables.values())
    check_picture(tmp_path / "demo.svg")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.soak  # they take minutes; what they show is tested by itself
@pytest.mark.parametrize("how", ["three drivers", "bucket"])
def test_the_demo_survives_its_kills_beyond_one_process(how: str) -> None:
    if how == "bucket" and find_program() is None:
        pytest.skip(NONE_HERE)
    command = ["tests.s3_demo"] if how == "bucket" else ["tidegate", "demo", "--drivers", "3"]
    command = [sys.executable, "-m", *command, "--files", "12", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed with SIGKILL" in done.stderr
    assert "nothing lost, nothing twice" in done.stderr
    verdict = answered(done.stdout)
    assert isinstance(verdict, DemoAnswer)
    assert all(each.found == each.expected > 0 for each in verdict.tables.values())


def check_picture(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert set(re.findall(r"https?://[^\"')\s]+", text)) == {"http://www.w3.org/2000/svg"}  # it fetches nothing
    said = "".join(ET.fromstring(text).itertext()).replace("\xa0", " ")
    for part in ("pipeline demo, generation 3", "killed with SIGKILL", "nothing lost, nothing twice"):
        assert part in said


def test_the_picture_of_the_demo_is_small_and_whole() -> None:
    check_picture(ROOT / "docs" / "demo.svg")


def test_the_generated_parts_of_the_architecture_are_up_to_date() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert text == rendered(text), "run ./dev docs"


def test_the_reference_is_up_to_date() -> None:
    for name, text in reference.files().items():
        assert (reference.FOLDER / name).read_text(encoding="utf-8") == text, "run ./dev docs"


PAGES = sorted(path for which in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in ROOT.glob(which))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target

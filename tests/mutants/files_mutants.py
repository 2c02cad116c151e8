"""What files in a folder could get wrong: guarantees of `tidegate.storage.files`, each taken away in turn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final
from unittest import mock

from tests.mutants.mutation import Edit, Mutant, Property, Section, rewrite
from tidegate.storage.files import Files
from tidegate.storage.folder import Folder, link
from tidegate.testing.files import FilesConformance


class OfAFolder(FilesConformance):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make_files(self, name: str) -> Files:
        return Folder(self._folder / name)


@cache
def passes(test: Callable[[FilesConformance], None]) -> Property:
    def holds() -> None:
        with tempfile.TemporaryDirectory(prefix="tidegate-files-") as folder:
            test(OfAFolder(Path(folder)))

    holds.__name__ = test.__name__.removeprefix("test_")
    return holds


def what_is_written_is_on_the_disk_with_its_name() -> None:
    forced: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tidegate-files-") as folder:
        files = Folder(folder)

        def fsync(handle: int) -> None:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            forced.append("the name" if path.is_dir() else "the content")
            assert path.is_dir() == files.exists("a"), "a name came before its content"

        with mock.patch.object(os, "fsync", fsync):
            files.write("a", b"content")
    assert set(forced) == {"the content", "the name"}


FILES_DEFECTS: Final = (
    Mutant(
        "create_writes_over_what_is_there",
        Section.OWN,
        "of two that claim a slot of the decision log both win",
        rewrite(Edit(Folder.create, "os.link", "Path.replace")),
        passes(FilesConformance.test_of_many_that_create_one_name_exactly_one_does),
    ),
    Mutant(
        "a_file_is_written_in_place",
        Section.OWN,
        "what Spark writes anew changes what a snapshot keeps; and a reader sees half of it",
        rewrite(
            Edit(
                Folder.write,
                "self._give_name(name, data, Path.replace)",
                "self._make_folder_of(self._path(name))\nself._path(name).write_bytes(data)",
            )
        ),
        passes(FilesConformance.test_what_is_kept_outlives_what_it_was_kept_from),
    ),
    Mutant(
        "what_is_kept_is_where_it_was",
        Section.OWN,
        "Spark deletes a file that a snapshot refers to",
        rewrite(Edit(link, "os.link(source, target)", "os.symlink(source, target)")),
        passes(FilesConformance.test_what_is_kept_outlives_what_it_was_kept_from),
    ),
    Mutant(
        "a_copy_is_a_second_name",
        Section.OWN,
        "what damages a file damages its copy in a full snapshot",
        rewrite(
            Edit(
                Folder.copy,
                "shutil.copyfile(found._path(source_name), hidden)",
                "os.link(found._path(source_name), hidden)",
            )
        ),
        passes(FilesConformance.test_a_copy_shares_nothing_with_what_it_was_made_of),
    ),
    Mutant(
        "a_file_has_its_name_before_its_content_is_on_the_disk",
        Section.OWN,
        "a loss of power leaves a decision that is empty",
        rewrite(Edit(Folder._give_name, "if self._forces and data:", "if False:")),
        what_is_written_is_on_the_disk_with_its_name,
    ),
    Mutant(
        "a_name_is_not_forced_to_the_disk",
        Section.OWN,
        "a loss of power takes a decision back that sinks have committed by",
        rewrite(Edit(Folder._give_name, "if self._forces:", "if False:")),
        what_is_written_is_on_the_disk_with_its_name,
    ),
)

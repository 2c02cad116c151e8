"""What keys and values over files could get wrong: guarantees of `tidegate.cluster.kv`, each taken away in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final
from unittest import mock

from tests.mutants.mutation import Edit, Mutant, Property, Section, rewrite
from tidegate.cluster.beats import Beats, _Member
from tidegate.cluster.files import FilesSession
from tidegate.cluster.keys import _check_part
from tidegate.cluster.kv import Session
from tidegate.cluster.listing import Listing
from tidegate.storage.memory import Memory
from tidegate.testing import kv
from tidegate.testing.kv import KVConformance


class OverFiles(KVConformance):
    lease_s = 1.0

    def setup_method(self) -> None:
        super().setup_method()
        self._memories: dict[str, Memory] = {}

    def make_session(self, name: str) -> Session:
        return FilesSession(self._memories.setdefault(name, Memory(name)), lease_s=self.lease_s)


class OverRequests(OverFiles):
    """Where each call is a request."""

    def make_session(self, name: str) -> Session:
        files = self._memories.setdefault(name, Memory(name))
        return FilesSession(files, lease_s=self.lease_s, poll_s=(0.5, 1.0), is_far=True)


@cache
def passes(test: Callable[[KVConformance], None], over: type[OverFiles] = OverFiles) -> Property:
    def holds() -> None:
        suite = over()
        suite.setup_method()
        try:
            with mock.patch.object(kv, "LONG_S", 4 * suite.lease_s):  # a mutant is not waited for as long
                test(suite)
        finally:
            suite.teardown_method()

    holds.__name__ = test.__name__.removeprefix("test_") + ("" if over is OverFiles else "_by_requests")
    return holds


KV_DEFECTS: Final = (
    Mutant(
        "a_key_is_created_by_all_that_try",
        Section.OWN,
        "two hold what only one may, since each has seen that nobody did",
        rewrite(
            Edit(
                FilesSession._make,
                "return self._files.create(file, data) or self._files.read(file) == data",
                "is_new = not self._files.exists(file)\nself._files.write(file, data)\nreturn is_new",
            )
        ),
        passes(KVConformance.test_create_writes_only_where_nothing_is),
    ),
    Mutant(
        "a_swap_does_not_look_at_what_it_replaces",
        Section.OWN,
        "a key that was deleted comes back, and a version that nobody has read is replaced",
        rewrite(Edit(FilesSession.swap, "if self._list(folder, anew=True).get(name) != version:", "if False:")),
        passes(KVConformance.test_swap_writes_only_over_the_version_that_it_is_given),
    ),
    Mutant(
        "versions_begin_anew_after_a_delete",
        Section.OWN,
        "a board that was written anew looks older than the one that was read",
        rewrite(Edit(FilesSession.write, "max(owned.newest + 1, time.time_ns())", "owned.newest + 1")),
        passes(KVConformance.test_versions_grow_with_every_change_also_over_a_delete),
    ),
    Mutant(
        "the_first_version_is_taken_for_the_last",
        Section.OWN,
        "who reads a key that was swapped sees what it was at first",
        rewrite(Edit(FilesSession.read, " and not self._files.exists(_file(key, _SECOND))", "")),
        passes(KVConformance.test_swap_writes_only_over_the_version_that_it_is_given),
    ),
    Mutant(
        "who_joins_leaves_the_beats_of_who_was_before",
        Section.OWN,
        "a process goes on as if nobody else had had its name for a moment",
        rewrite(
            Edit(Beats.join, "_remove(self._files, others)", "pass"),
            Edit(
                Beats.join,
                "_remove(self._files, (beat for beat in self._listed() if _is_before(beat.life, member.life)))",
                "pass",
            ),
        ),
        passes(KVConformance.test_who_was_not_present_for_a_moment_only_hears_of_it),
    ),
    Mutant(
        "nobody_looks_whether_its_last_beat_was_removed",
        Section.OWN,
        "a process whose stages were given to others runs them too",
        rewrite(Edit(_Member._beat, "_Beat(self.life, self._arrived) not in beats", "False")),
        passes(KVConformance.test_who_was_not_present_for_a_moment_only_hears_of_it),
    ),
    Mutant(
        "a_list_from_before_a_write_serves_after_it",
        Section.OWN,
        "who has deleted a key still sees it, and who has made one does not",
        rewrite(Edit(Listing.changed, "self._changes += 1", "pass")),
        passes(KVConformance.test_versions_grow_with_every_change_also_over_a_delete, OverRequests),
    ),
    Mutant(
        "a_key_may_hold_what_parts_its_version_off",
        Section.OWN,
        "one key is taken for a version of another",
        rewrite(Edit(_check_part, '"@" in part or ', "")),
        passes(KVConformance.test_what_is_no_key_is_refused),
    ),
)

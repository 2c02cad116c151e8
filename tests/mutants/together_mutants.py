"""What instances that run one pipeline together could get wrong, and the simulator sees (`--together`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from tests.mutants.mutation import Edit, rewrite
from tests.mutants.whole_mutants import WholeMutant
from tidegate.cluster.exchange import Exchange
from tidegate.cluster.spills import Spills
from tidegate.engine.cleaning import Cleaning, Walk
from tidegate.engine.company import Company
from tidegate.engine.ending import Consumption
from tidegate.engine.generation import Generation
from tidegate.engine.links import Links
from tidegate.flows import cleaning
from tidegate.testing.simulator.whole import WholeScenario, random_together_scenario


def getter(owner: type, name: str) -> Callable[..., Any]:
    """What is called when a property is asked for."""
    found: Callable[..., Any] = vars(owner)[name].fget
    return found


def busy(seed: int) -> WholeScenario:
    """Much flows between instances, and what they share is seen late."""
    whole = random_together_scenario(seed)
    together = msgspec.structs.replace(whole.together, instances=3, late=0, stale=0.6)
    return msgspec.structs.replace(
        whole, together=together, rows=dict.fromkeys(whole.rows, 60), chains=0.0, damages=0, crashes=2
    )


def calm(seed: int) -> WholeScenario:
    """Nobody dies, or is taken for dead: instances come and go in order."""
    whole = busy(seed)
    together = msgspec.structs.replace(whole.together, stale=0.0, cuts=0, doubts=0, expiries=0, leaves=2, late=1)
    return msgspec.structs.replace(
        whole, together=together, crashes=0, kills=0, pauses=0, power_losses=0, full_disks=0, standstills=0
    )


def in_doubt(seed: int) -> WholeScenario:
    """What is written is often in doubt, and instances are often taken for dead."""
    whole = busy(seed)
    together = msgspec.structs.replace(whole.together, doubts=12, expiries=4, cuts=3)
    return msgspec.structs.replace(whole, together=together)


def ending(seed: int) -> WholeScenario:
    """Runs end when they have consumed all, and are told to drain."""
    whole = busy(seed)
    return msgspec.structs.replace(whole, available_now=1.0, requests=4)


def talkative(seed: int) -> WholeScenario:
    """All that is said is too large for what is shared."""
    whole = in_doubt(seed)
    return msgspec.structs.replace(whole, together=msgspec.structs.replace(whole.together, most_bytes=200))


def talkative_and_calm(seed: int) -> WholeScenario:
    """The same, where nothing goes wrong."""
    whole = calm(seed)
    return msgspec.structs.replace(whole, together=msgspec.structs.replace(whole.together, most_bytes=100))


TOGETHER_DEFECTS: Final = (
    # -- cleaning up together
    WholeMutant(
        "the_leader_forgets_what_stages_elsewhere_start_from",
        "what members hold of older generations is taken for what a run that was killed has left",
        rewrite(Edit(Walk.found, "if self.elsewhere is None else references(self.root, self.elsewhere)", "")),
        "NothingNeededDeleted",
        40,
        busy,
    ),
    WholeMutant(
        "the_last_walk_looks_at_older_generations_alone",
        "what older checkpoints of the same generation hold of stages elsewhere is deleted at the end",
        rewrite(Edit(Walk._referring, " or self.elsewhere is not None", "")),
        "NothingNeededDeleted",
        80,
        busy,
    ),
    WholeMutant(
        "a_member_walks_through_older_generations",
        "a member deletes what others may hold, of whom it knows nothing",
        rewrite(Edit(Cleaning._next_walk, "if not self._leads:\n        return None", "")),
        "OwnStages",
        10,
        busy,
    ),
    WholeMutant(
        "a_member_cleans_up_after_what_it_starts_from",
        "positions of queries are looked for in a checkpoint that was taken of other chains",
        rewrite(Edit(cleaning.clean_up_own, " or record.generation != generation", "")),
        "Unexpected",
        40,
        random_together_scenario,
    ),
    WholeMutant(
        "a_member_goes_before_it_has_cleaned_up",
        "what lies behind the last checkpoint is left by members, though the run has ended in order",
        rewrite(Edit(getter(Generation, "has_cleaned_up"), "not self._is_cleaning and", "True or")),
        "NothingLeft",
        20,
        busy,
    ),
    WholeMutant(
        "segments_are_kept_for_readers_here_alone",
        "what a reader elsewhere has yet to consume is deleted",
        rewrite(
            Edit(
                Cleaning._consumed,
                "for query in self._queries:",
                "for query in [each for each in self._queries if each.name in self._stages]:",
            ),
            Edit(Cleaning._consumed, "take_consumed(through[name])", "take_consumed(through.get(name, 10**9))"),
        ),
        "RowsInOrder",
        40,
        busy,
    ),
    # -- what is said
    WholeMutant(
        "entries_are_trimmed_before_they_are_taken",
        "an entry of a channel is deleted that a reader elsewhere has not heard of",
        rewrite(
            Edit(
                Links._trim,
                "outlet.on_taken(each, self.told_by(each).taken.get(name, (0, 0))[0])",
                "outlet.on_taken(each, outlet.appended)",
            )
        ),
        "Liveness",
        10,
        busy,
    ),
    WholeMutant(
        "announcements_are_not_said_again",
        "what a member has missed of what the leader has announced is said no more",
        rewrite(
            Edit(Links.say, "seen_by_all(generation.leader.seen_by_all)", "seen_by_all(10**9)"),
        ),
        "Liveness",
        10,
        busy,
    ),
    WholeMutant(
        "an_entry_in_doubt_is_of_another_process",
        "an entry whose write was not answered is found there, and taken for somebody else's",
        rewrite(Edit(Exchange._create, "found.value != value", "True")),
        "Exchange",
        20,
        in_doubt,
    ),
    WholeMutant(
        "boards_of_another_generation_are_handed_over",
        "how far readers had come in a generation before is taken for how far they are",
        rewrite(Edit(Links._board_of, " or board.generation != self._generation", "")),
        "Liveness",
        60,
        busy,
    ),
    WholeMutant(
        "a_leader_of_another_generation_is_obeyed",
        "a member takes announcements of whoever leads anything",
        rewrite(Edit(Links._from_leader, "if each.generation == self._generation", "")),
        "Liveness",
        40,
        busy,
    ),
    WholeMutant(
        "channels_of_generations_before_are_left",
        "entries that were not taken when a generation ended stay for ever",
        rewrite(
            Edit(Exchange._delete_left, "if found := self._session.read_folder(folder):", "if found := ():"),
        ),
        "NothingLeft",
        40,
        calm,
    ),
    WholeMutant(
        "large_boards_of_incarnations_before_are_left",
        "what a process has written to the root for others stays there when it is gone",
        rewrite(Edit(Spills.delete_but_last, "if each != own", "if False")),
        "NothingLeft",
        60,
        talkative,
    ),
    WholeMutant(
        "large_entries_stay_when_they_are_trimmed",
        "what a channel has held for readers elsewhere lies in the root when its key is gone",
        rewrite(
            Edit(Exchange._delete_what_is_over, "self._spills.delete(keys)", "pass"),
            Edit(Exchange._delete_left, "self._spills.clear(folder)", "pass"),
        ),
        "NothingLeft",
        40,
        talkative_and_calm,
    ),
    # -- who runs what
    WholeMutant(
        "a_process_runs_its_part_of_a_generation_again",
        "a process whose part has failed does once more what it was ordered to",
        rewrite(Edit(Company.ordered, "order is None or order.generation <= self.followed", "order is None")),
        "OneRunner",
        60,
        in_doubt,
    ),
    WholeMutant(
        "an_order_to_another_incarnation_is_obeyed",
        "a process that was started again runs what the one before was ordered to",
        rewrite(Edit(Company.ordered, "order.incarnation == self.own.incarnation", "True")),
        "Unexpected",
        60,
        in_doubt,
    ),
    WholeMutant(
        "a_lost_session_is_not_noticed",
        "a process that others have taken for dead goes on, and nobody hears it",
        rewrite(Edit(getter(Company, "heard"), "if heard.is_lost:", "if False:")),
        "Liveness",
        20,
        in_doubt,
    ),
    # -- the end
    WholeMutant(
        "the_end_of_a_run_before_ends_this_one",
        "what whoever leads has said at the end of the run before is taken for what it says now",
        rewrite(Edit(Company._note_leaders, " and _told(board).ended is None", "")),
        "Requests",
        60,
        ending,
    ),
    WholeMutant(
        "a_drain_does_not_wait_for_queries_elsewhere",
        "a run ends before members have consumed what its sources have read",
        rewrite(Edit(Consumption.is_complete, "rests = {} if links is None else links.rests()", "rests = {}")),
        "Drained",
        60,
        ending,
    ),
)

"""What could be wrong with how instances find each other, talk to each other, and share the stages."""

from __future__ import annotations

from typing import Final

from tests.cluster import exchange_properties
from tests.mutants import cluster_properties, scenarios
from tests.mutants.mutation import Edit, Mutant, Section, Simulated, rewrite
from tidegate.cluster.exchange import Exchange
from tidegate.cluster.leftovers import Leftovers
from tidegate.flows.boards import LeaderSays, MemberSays, hand_to_leader
from tidegate.flows.instance import Instance, had_part
from tidegate.flows.leader import Leader
from tidegate.flows.member import Member
from tidegate.protocol.membership import Crew, Gathering, LeaderClaim, standing
from tidegate.protocol.outlet import Outlet
from tidegate.protocol.placement import place

CLUSTER_DEFECTS: Final = (
    # -- who leads, and who is there
    Mutant(
        "a_claim_outlives_its_incarnation",
        Section.OWN,
        "who was started again is taken for the leader that it was, and nobody leads",
        rewrite(Edit(LeaderClaim.is_valid, " and there.incarnation == self.incarnation", "")),
        Simulated("Liveness", 20, scenarios.leaders_crash),
    ),
    Mutant(
        "a_claim_outlives_its_instance",
        Section.OWN,
        "the claim of somebody who is gone for good counts for ever",
        rewrite(Edit(LeaderClaim.is_valid, "there is not None and there.incarnation == self.incarnation", "True")),
        Simulated("Liveness", 20, scenarios.leaders_crash),
    ),
    Mutant(
        "nobody_campaigns_against_a_void_claim",
        Section.OWN,
        "whoever sees that nobody leads waits for somebody to do so",
        rewrite(Edit(standing, "Standing.CAMPAIGNS if", "Standing.CAMPAIGNS if claim is None and")),
        Simulated("Liveness", 20, scenarios.leaders_crash),
    ),
    Mutant(
        "a_missing_member_is_waited_for_for_ever",
        Section.OWN,
        "the stages of an instance that is gone for good run nowhere",
        rewrite(Edit(Crew.why_reopen, "if over:", "if False:")),
        Simulated("Liveness", 20, scenarios.members_die),
    ),
    Mutant(
        "an_instance_that_is_gone_is_expected_for_ever",
        Section.OWN,
        "no generation is opened without those that had a part in the one before",
        rewrite(Edit(Gathering.is_over, "is_complete or now_ms >= self._until_ms", "is_complete")),
        Simulated("Liveness", 20, scenarios.members_die),
    ),
    Mutant(
        "a_member_that_was_started_again_is_not_noticed",
        Section.OWN,
        "the leader waits for an incarnation that cannot come back",
        rewrite(Edit(Crew.on_present, "self._replaced.add(name)", "pass")),
        cluster_properties.a_member_that_was_started_again_is_not_waited_for,
    ),
    Mutant(
        "another_incarnation_is_as_good",
        Section.OWN,
        "the leader goes on with an instance that has lost its stages",
        rewrite(Edit(Crew.on_present, " and there.incarnation == incarnation", "")),
        Simulated("Liveness", 20, scenarios.members_expire),
    ),
    Mutant(
        "there_is_no_grace",
        Section.OWN,
        "a member that is not seen for a moment makes all go back to the last checkpoint",
        rewrite(Edit(Crew.why_reopen, "now_ms - since >= self._grace_ms", "True")),
        cluster_properties.a_missing_member_is_waited_for_as_long_as_the_grace_and_no_longer,
    ),
    Mutant(
        "a_lost_member_aborts_nothing",
        Section.OWN,
        "a checkpoint waits until its timeout for a member that is gone",
        rewrite(Edit(Instance._look_at_crew, "leader.on_lost(instance)", "pass")),
        cluster_properties.a_member_that_is_not_seen_aborts_at_once_and_holds_the_next,
    ),
    Mutant(
        "a_lost_member_holds_nothing_back",
        Section.OWN,
        "checkpoints are begun one after the other that cannot be complete",
        rewrite(Edit(Leader.on_lost, "self.coordinator.hold(instance)", "pass")),
        cluster_properties.a_member_that_is_not_seen_aborts_at_once_and_holds_the_next,
    ),
    Mutant(
        "a_member_that_is_back_is_not_seen",
        Section.OWN,
        "no checkpoint is ever begun again after one reader has looked at the wrong moment",
        rewrite(Edit(Instance._look_at_crew, "leader.on_back(instance)", "pass")),
        Simulated("Liveness", 40, scenarios.leaders_blink),
    ),
    Mutant(
        "who_leaves_is_waited_for",
        Section.OWN,
        "whoever leaves in order costs as much time as whoever dies",
        rewrite(Edit(Gathering.is_over, "not self.missing(present)", "not self.missing(staying(present))")),
        cluster_properties.who_leaves_is_not_waited_for,
    ),
    Mutant(
        "who_has_left_is_expected",
        Section.OWN,
        "the next leader waits for the one that has left in order",
        rewrite(Edit(had_part, "or not said.is_leaving", "or True")),
        cluster_properties.who_has_left_is_not_expected,
    ),
    Mutant(
        "everybody_makes_way",
        Section.OWN,
        "an instance that is alone opens a generation after every checkpoint, because it wants to leave",
        rewrite(Edit(Crew.on_present, "name not in staying(present)", "present[name].is_leaving")),
        cluster_properties.where_all_want_to_leave_nobody_makes_way,
    ),
    Mutant(
        "who_comes_is_let_in_at_once",
        Section.OWN,
        "all go back to a checkpoint of long ago for the sake of somebody who has come",
        rewrite(Edit(Crew.why_reopen, "if completed > since", "if True")),
        cluster_properties.who_comes_waits_for_a_checkpoint,
    ),
    Mutant(
        "a_void_claim_stays",
        Section.OWN,
        "a leader leads on under the claim of one that is gone, and ends when the next one sees that",
        rewrite(Edit(Instance._look_at_crew, "Cue.CAMPAIGN if self.standing is Standing.CAMPAIGNS else ", "")),
        cluster_properties.who_leads_on_takes_a_void_claim_back,
    ),
    Mutant(
        "who_is_cut_off_takes_the_pipeline_back",
        Section.OWN,
        "a leader that hears nothing opens a generation each time that another one does, and no checkpoint completes",
        rewrite(Edit(Instance.look, "if self._hearing <= self._ended_at:", "if False:")),
        cluster_properties.who_is_cut_off_does_not_take_the_pipeline_back,
    ),
    Mutant(
        "two_go_on_leading",
        Section.OWN,
        "a leader sees that another one leads, and works in vain until the log tells it",
        rewrite(Edit(Instance._look_at_crew, "if self.standing is Standing.FOLLOWS:", "if False:")),
        cluster_properties.who_sees_another_one_lead_ends_its_generation,
    ),
    # -- what runs where
    Mutant(
        "a_query_is_given_to_two",
        Section.OWN,
        "a stage runs in two processes, which write the same channel",
        rewrite(Edit(place, "if placed[each.name] == instance", "if placed[each.name] == instance or not each.inputs")),
        Simulated("RunOnce", 10, scenarios.three_instances),
    ),
    Mutant(
        "a_query_is_given_to_nobody",
        Section.OWN,
        "a stage that nobody has asked for runs nowhere",
        rewrite(
            Edit(
                place,
                "if placed[each.name] == instance",
                "if placed[each.name] == instance and each.stages[0] in wanted",
            )
        ),
        Simulated("RunOnce", 10, scenarios.three_instances),
    ),
    # -- boards
    Mutant(
        "a_board_of_another_generation_is_heard",
        Section.OWN,
        "a leader takes what was said to the one before it",
        rewrite(Edit(hand_to_leader, "if board.generation == leader.generation:", "if True:")),
        Simulated("Liveness", 20, scenarios.members_fail),
    ),
    Mutant(
        "announcements_of_another_generation_are_obeyed",
        Section.OWN,
        "a member takes what an old leader announces",
        rewrite(Edit(Member.on_announced, "announced.generation != self.generation or ", "")),
        Simulated("Protocol", 20, scenarios.three_instances),
    ),
    Mutant(
        "announcements_go_when_one_has_seen_them",
        Section.OWN,
        "a member that was late never hears of a checkpoint",
        rewrite(
            Edit(Leader.__dict__["seen_by_all"].fget, "return min(", "return max("),
        ),
        Simulated("Liveness", 20, scenarios.three_instances),
    ),
    Mutant(
        "announcements_on_a_board_hide_one_another",
        Section.OWN,
        "only what was announced last is on the board",
        rewrite(
            Edit(
                LeaderSays.say,
                "self._announcements.update({each.sequence: each for each in announcements})",
                "self._announcements = {each.sequence: each for each in announcements}",
            )
        ),
        cluster_properties.announcements_stay_until_all_have_taken_them,
    ),
    Mutant(
        "an_ack_hides_another",
        Section.OWN,
        "of two checkpoints that a member has acknowledged, the leader hears of one",
        rewrite(
            Edit(
                MemberSays.say,
                "self._acks[message.checkpoint_id] = message",
                "self._acks = {message.checkpoint_id: message}",
            )
        ),
        cluster_properties.an_ack_hides_no_other,
    ),
    Mutant(
        "acks_are_forgotten_too_early",
        Section.OWN,
        "an ack goes from the board when another checkpoint has ended",
        rewrite(
            Edit(MemberSays.forget_but, "for key, each in self._acks.items() if key in known", "for key, each in ()")
        ),
        cluster_properties.an_ack_hides_no_other,
    ),
    Mutant(
        "what_is_visible_is_dropped_again_and_again",
        Section.OWN,
        "the store is asked to drop the same rows each time a board is read",
        rewrite(Edit(Member.on_visible, "if visible.through_batch > self._dropped.get(visible.sink, -1):", "if True:")),
        cluster_properties.what_is_visible_is_dropped_once,
    ),
    Mutant(
        "a_leader_that_has_stepped_down_goes_on",
        Section.OWN,
        "a leader that gives up begins something in the same moment",
        rewrite(
            Edit(Leader._start, "if self._has_stepped_down:", "if False:"),
            Edit(Leader._announce_to, "if self._has_stepped_down:", "if False:"),
        ),
        Simulated("NothingAfterSteppingDown", 100),
    ),
    # -- what is shared
    Mutant(
        "a_late_write_is_not_noticed",
        Section.OWN,
        "a write that was given up takes effect, and hides for ever what was said since",
        rewrite(Edit(Exchange._check_own, "if entry.value != self._sent[key]:", "if False:")),
        exchange_properties.a_late_write_hides_nothing_for_long,
    ),
    Mutant(
        "a_board_that_was_not_written_counts_as_said",
        Section.OWN,
        "what could not be written is not tried again",
        rewrite(
            Edit(
                Exchange._write,
                "self._sent[key] = value",
                "self._sent[key] = value\nself._written[key] = board",
            )
        ),
        exchange_properties.what_could_not_be_written_is_written_again,
    ),
    Mutant(
        "a_lost_session_goes_on",
        Section.OWN,
        "a process that others have taken for dead neither joins anew nor stops",
        rewrite(Edit(Exchange.receive, "is_lost=True", "is_lost=False")),
        Simulated("Liveness", 20, scenarios.members_expire),
    ),
    Mutant(
        "a_campaign_is_against_whoever_leads_by_then",
        Section.OWN,
        "who has seen that nobody leads takes the place of the one who leads since",
        rewrite(Edit(Exchange.send, "self._try_to_lead(heard)", "self._try_to_lead(self.heard)")),
        exchange_properties.a_claim_that_was_made_meanwhile_is_left_alone,
    ),
    Mutant(
        "a_board_that_cannot_be_read_is_none",
        Section.OWN,
        "what a process has said is gone for as long as the next of it cannot be read",
        rewrite(
            Edit(
                Exchange._boards_in,
                "if found is not None:\n                board = found",
                "board = found\nif found is not None:",
            )
        ),
        exchange_properties.a_board_whose_file_is_gone_is_the_one_that_was_read_before,
    ),
    Mutant(
        "what_was_spilled_stays",
        Section.OWN,
        "a large board leaves its file in the root for ever",
        rewrite(Edit(Exchange._write, "if self._spilled.get(key) != is_large:", "if False:")),
        exchange_properties.what_was_spilled_is_deleted_when_it_is_not_needed,
    ),
    Mutant(
        "a_large_entry_without_its_file_counts_as_taken",
        Section.OWN,
        "an entry that cannot be read for a moment is lost",
        rewrite(Edit(Exchange._read_on, "return  # it was", "following.taken[channel] += 1\ncontinue  # it was")),
        exchange_properties.a_large_entry_whose_file_is_gone_is_not_taken,
    ),
    Mutant(
        "what_was_spilled_of_a_channel_stays",
        Section.OWN,
        "a large entry leaves its file in the root when all have taken it",
        rewrite(Edit(Exchange._delete_what_is_over, "self._spills.delete(keys)", "pass")),
        exchange_properties.a_large_entry_is_in_the_root_before_its_key_names_it,
    ),
    Mutant(
        "boards_of_whoever_is_not_seen_go_at_once",
        Section.OWN,
        "what somebody has said is deleted who was not seen for a moment, or is just starting again",
        rewrite(Edit(Leftovers.look, " if before.get(key) == each", "")),
        exchange_properties.boards_stay_until_they_were_nobodys_twice,
    ),
    Mutant(
        "boards_of_members_that_are_waited_for_go",
        Section.OWN,
        "nobody knows any more what a member has said that may be back within the grace",
        rewrite(Edit(Exchange._tidy, "name in stays or ", "")),
        exchange_properties.boards_stay_of_who_is_there_or_has_a_part,
    ),
    Mutant(
        "boards_go_before_the_next_generation_is_told",
        Section.OWN,
        "nobody can hear any more how the pipeline has ended, or who had a part in it",
        rewrite(Edit(Exchange._tidy, "if own is None or own.generation != generation:", "if False:")),
        exchange_properties.boards_of_the_last_generation_stay_until_the_next_is_told,
    ),
    Mutant(
        "a_leader_that_was_superseded_deletes_boards",
        Section.OWN,
        "what is said in the newest generation is deleted by who leads one before it",
        rewrite(
            Edit(
                Exchange._tidy, "if any(each.generation > generation for each in heard.leaders.values()):", "if False:"
            )
        ),
        exchange_properties.boards_stay_where_somebody_has_taken_over,
    ),
    Mutant(
        "a_board_that_is_gone_is_not_said_again",
        Section.OWN,
        "who was wrongly taken for gone is not heard until it has something new to say",
        rewrite(Edit(Exchange._check_own, "if self._written.pop(key, None) is not None:", "if False:")),
        exchange_properties.a_board_that_was_deleted_wrongly_is_said_again,
    ),
    Mutant(
        "entries_that_were_still_being_read_are_heard",
        Section.OWN,
        "what was being read of a generation that is over is taken for the next one's",
        rewrite(Edit(Exchange._read_on, "following.entries", "self._following.entries")),
        exchange_properties.entries_that_were_followed_before_are_not_heard,
    ),
    Mutant(
        "entries_that_are_heard_at_once_are_dropped",
        Section.OWN,
        "what another thread hears of a channel as soon as it is followed is forgotten, and counts as taken",
        rewrite(Edit(Exchange.follow, "self._set_folders()", "self._set_folders()\nself._following.entries.clear()")),
        exchange_properties.entries_that_are_heard_while_it_begins_to_follow_are_kept,
    ),
    Mutant(
        "an_entry_is_skipped",
        Section.OWN,
        "a reader in another process misses what a channel holds",
        rewrite(
            Edit(
                Exchange._read_on,
                "following.entries.append((channel, value))",
                "if following.taken[channel] != 2:\n    following.entries.append((channel, value))",
            ),
        ),
        Simulated("EntriesOnce", 10, scenarios.three_instances),
    ),
    Mutant(
        "entries_are_heard_twice",
        Section.OWN,
        "what is read again of a channel is taken again",
        rewrite(
            Edit(
                Exchange._read_on,
                "found =",
                "following.taken[channel] = max(0, following.taken[channel] - 1)\nfound =",
            )
        ),
        Simulated("EntriesOnce", 10, scenarios.three_instances),
    ),
    Mutant(
        "entries_of_an_older_generation_are_heard",
        Section.OWN,
        "what is followed is added to what was followed before",
        rewrite(
            Edit(Exchange.follow, "_Following(channels)", "_Following([*self._following.taken, *channels])"),
        ),
        Simulated("EntriesOnce", 40, scenarios.slow_to_hear),
    ),
    Mutant(
        "an_entry_that_was_not_written_counts_as_sent",
        Section.OWN,
        "an entry that could not be written leaves a gap, at which its readers stand for ever",
        rewrite(
            Edit(
                Exchange.send,
                "self._create(self._appended[0])\n        self._appended.popleft()",
                "self._create(self._appended.popleft())",
            )
        ),
        Simulated("Liveness", 60, scenarios.writes_late),
    ),
    Mutant(
        "an_entry_that_is_there_already_is_somebody_elses",
        Section.OWN,
        "an entry whose first attempt was not answered ends the process",
        rewrite(Edit(Exchange._create, "if found.value != value:", "if True:")),
        Simulated("Protocol", 20, scenarios.writes_late),
    ),
    Mutant(
        "entries_go_when_one_reader_has_taken_them",
        Section.OWN,
        "an entry is deleted that a reader has yet to take",
        rewrite(Edit(Outlet.let_go, "min(self._taken.values(), default=self._next)", "max(self._taken.values())")),
        Simulated("EntriesOnce", 40, scenarios.three_instances),
    ),
)

MISTAKEN: Final = (
    Mutant(
        "everybody_leads",
        Section.OWN,
        "each instance believes that it leads, whatever it sees",
        rewrite(
            Edit(standing, "if claim is not None and claim.is_valid(present):", "return Standing.LEADS\nif False:")
        ),
        Simulated("", 5, scenarios.three_instances),
    ),
    Mutant(
        "claims_are_taken_whatever_they_say",
        Section.OWN,
        "who campaigns does not compare versions",
        rewrite(
            Edit(
                Exchange._try_to_lead,
                "self._session.swap(LEADER, value, version)",
                'found = self._session.read_folder("election").get("leader")\n'
                "self._session.swap(LEADER, value, version if found is None else found.version)",
            )
        ),
        Simulated("", 5, scenarios.three_instances),
    ),
    Mutant(
        "two_go_on_leading",
        Section.OWN,
        "a leader sees that another one leads, and does not end its generation",
        rewrite(Edit(Instance._look_at_crew, "if self.standing is Standing.FOLLOWS:", "if False:")),
        Simulated("", 5, scenarios.leaders_blink),
    ),
    Mutant(
        "nobody_is_ever_missing",
        Section.OWN,
        "the leader believes that all its members live",
        rewrite(Edit(Crew.on_present, "if there is not None and there.incarnation == incarnation:", "if True:")),
        Simulated("", 5, scenarios.members_expire),
    ),
    Mutant(
        "all_claims_are_valid",
        Section.OWN,
        "whoever was once written down as the leader is taken for it",
        rewrite(Edit(LeaderClaim.is_valid, "there is not None and there.incarnation == self.incarnation", "True")),
        Simulated("", 5, scenarios.leaders_crash),
    ),
    Mutant(
        "a_lost_session_goes_on",
        Section.OWN,
        "a process that others have taken for dead goes on",
        rewrite(Edit(Exchange.receive, "is_lost=True", "is_lost=False")),
        Simulated("", 5, scenarios.members_expire),
    ),
)
"""What an instance may believe wrongly: that costs a restart, or all progress, and never a row."""

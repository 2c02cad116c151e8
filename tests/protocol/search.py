"""How hard the property tests of this folder search, and how they draw what happens next.

Every run searches the same examples, so that a green build stays green until the code changes. To search
longer and elsewhere: `TIDEGATE_SEARCH=20 pytest tests/protocol` takes 20 times as many, drawn anew. A failure
prints the blob that replays it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_EFFORT = int(os.environ.get("TIDEGATE_SEARCH", "0"))

Step = tuple[str, dict[str, object]]


def search(max_examples: int, steps: int = 50) -> settings:
    return settings(
        max_examples=max_examples * max(_EFFORT, 1),
        stateful_step_count=steps,
        derandomize=_EFFORT == 0,
        database=None,
        deadline=None,
        print_blob=True,
        # How fast the machine is says nothing about the protocol.
        suppress_health_check=[HealthCheck.too_slow],
    )


def steps(*kinds: tuple[int, str, dict[str, st.SearchStrategy[object]]]) -> st.SearchStrategy[Step]:
    """What may happen, each as weight, name and arguments. For a state machine with a single rule.

    Of several rules Hypothesis switches a random part off in each example. In a protocol hardly anything
    happens then: it takes upstreams, readers, batches and the clock together to get anywhere.
    """
    drawn: list[st.SearchStrategy[Step]] = []
    for weight, name, arguments in kinds:
        drawn += [st.tuples(st.just(name), st.fixed_dictionaries(arguments))] * weight
    return st.sampled_from(range(len(drawn))).flatmap(drawn.__getitem__)

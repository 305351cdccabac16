"""Random programs against a model that knows every past state and foresees what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tally
from geometries import GEOMETRIES
from hypothesis import HealthCheck, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from memra_driver.soak.calls import Program

CAPACITY = 24


class Machine(RuleBasedStateMachine):
    """A program whose calls are drawn by hypothesis."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    @rule(number=st.integers(0, 2**24 - 1))
    def call(self, number: int) -> None:
        note(self.program.call(number))

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        self.program.check()

    def teardown(self) -> None:
        self.program.close()
        tally.add(tally.EXAMPLES)


def profile(examples: int, calls: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=calls, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip


@pytest.mark.long(12)
@pytest.mark.parametrize("model", [*GEOMETRIES])
def test_programs_leave_plain_decoding_and_refuse_what_the_model_foresees(
    dev: Any, model: str, request: pytest.FixtureRequest
) -> None:
    if not hasattr(dev, "stream"):
        size = profile(90, 40)
    elif request.config.getoption("--gpu"):
        size = profile(100, 40)
    else:
        size = profile(12, 40)
    other = seed([*GEOMETRIES].index(model))  # the same programs in every run, others for every model
    geometry = GEOMETRIES[model]
    oracle = geometry.oracle(dev, CAPACITY)
    made = other(lambda: Machine(Program(geometry.player(dev, CAPACITY, oracle))))
    run_state_machine_as_test(made, settings=size)
    oracle.close()

"""Random programs against a model that knows every past state and foresees what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from geometries import GEOMETRIES
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from programs import Programs


def profile(examples: int, calls: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=calls, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip


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
    run_state_machine_as_test(other(lambda: Programs(dev, GEOMETRIES[model])), settings=size)

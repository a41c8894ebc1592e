"""Which mode each step has."""

from __future__ import annotations

import pytest

from zerooffload.config import UpdateMode
from zerooffload.errors import InternalError
from zerooffload.runtime.update_mode import ModeChooser


@pytest.mark.parametrize("uses_other_resources", [False, True])
@pytest.mark.parametrize(
    ("mode", "hides", "goes_ahead"),
    [
        (UpdateMode.AFTER_BACKWARD, False, False),
        (UpdateMode.UNDER_NEXT_FORWARD, True, False),
        (UpdateMode.DURING_BACKWARD, True, True),
    ],
)
def test_what_is_wanted_is_done_whatever_comes(
    mode: UpdateMode,
    uses_other_resources: bool,  # noqa: FBT001
    hides: bool,  # noqa: FBT001
    goes_ahead: bool,  # noqa: FBT001
) -> None:
    chooser = ModeChooser(mode, uses_other_resources)
    for _ in range(10):
        assert (chooser.hides, chooser.goes_ahead) == (hides, goes_ahead)
        chooser.stepped(clipped=True)


def test_auto_hides_where_that_costs_compute_nothing() -> None:
    alone = ModeChooser("auto", uses_other_resources=False)
    assert not alone.hides
    assert not alone.goes_ahead
    assert ModeChooser("auto", uses_other_resources=True).hides


def test_auto_stops_going_ahead_while_steps_clip() -> None:
    """One clipped step does nothing, two in a row end it for some steps, and it begins again."""
    chooser = ModeChooser("auto", uses_other_resources=True)
    ahead = []
    for clipped in [True, False, True, True, False, False, False, True, True, True, True, *[False] * 5]:
        chooser.stepped(clipped=clipped)
        assert chooser.hides
        ahead.append(chooser.goes_ahead)
    assert ahead[:2] == [True, True]
    assert ahead[3] is False
    assert ahead[6] is True
    assert ahead[10] is False
    assert ahead[-1] is True


def test_the_rate_is_a_running_mean() -> None:
    chooser = ModeChooser("auto", uses_other_resources=True)
    chooser.stepped(clipped=True)
    assert chooser.clip_rate == 0.25
    chooser.stepped(clipped=True)
    assert chooser.clip_rate == 0.4375
    chooser.stepped(clipped=False)
    assert chooser.clip_rate == 0.328125


@pytest.mark.parametrize("mode", UpdateMode)
def test_auto_may_be_told_what_it_means_and_still_goes_not_ahead_while_steps_clip(mode: UpdateMode) -> None:
    chooser = ModeChooser("auto", uses_other_resources=True)
    assert chooser.mode is UpdateMode.DURING_BACKWARD
    chooser.aim_at(mode)
    assert chooser.mode is mode
    for _ in range(2):
        chooser.stepped(clipped=True)
    still = UpdateMode.UNDER_NEXT_FORWARD if mode is UpdateMode.DURING_BACKWARD else mode
    assert chooser.mode is still


def test_a_mode_that_the_user_has_chosen_stays() -> None:
    with pytest.raises(InternalError, match="updates are to run under_next_forward, not after_backward"):
        ModeChooser(UpdateMode.UNDER_NEXT_FORWARD, uses_other_resources=True).aim_at(UpdateMode.AFTER_BACKWARD)

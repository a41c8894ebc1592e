from __future__ import annotations

import subprocess
import sys

import pytest

from zerooffload.machine import OtherPrograms
from zerooffload.machine.cores import affinity
from zerooffload.machine.other_programs import Used

SPIN = "import sys\nprint(flush=True)\nwhile True: pass"


@pytest.mark.parametrize(
    ("then", "cores"),
    [
        (Used(clock=110.0, busy=1015.0, own=60.0), 0.5),
        (Used(clock=110.0, busy=1010.0, own=60.0), 0.0),
        # Clocks of the two kinds tick apart.
        (Used(clock=110.0, busy=1009.0, own=60.0), 0.0),
        (Used(clock=100.0, busy=1000.0, own=50.0), 0.0),
        # A core's time is counted in whole ticks.
        (Used(clock=100.001, busy=1000.0 + 0.01 * len(affinity()), own=50.0), len(affinity())),
    ],
)
def test_what_others_used_is_what_this_process_has_not(then: Used, cores: float) -> None:
    used = iter([Used(clock=100.0, busy=1000.0, own=50.0), then])
    assert OtherPrograms(lambda: next(used)).busy_cores() == cores


def test_a_program_that_never_rests_is_seen_and_the_own_work_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            others = OtherPrograms()
            while (busy := others.busy_cores()) == 0:
                sum(range(10_000))
            assert 0 < busy <= len(affinity())
        finally:
            other.kill()

"""Read hostile records and manifests, those of checkpoints too: `fuzz_journal.py --seconds 600 --seed 1`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fuzzing import attack_for_a_while
from support.hostile_files import attack

if __name__ == "__main__":
    attack_for_a_while(attack, __doc__)

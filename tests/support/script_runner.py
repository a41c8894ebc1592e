"""A process that runs scripts one after the other, each as if it were alone, so that they share slow imports.

A line of JSON on stdin is a script's path and its words; one on stdout is its exit status and what it wrote to stderr.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path


def run(path: str, words: list[str]) -> tuple[int, str]:
    """As the interpreter does: a text to exit with is an error that is told."""
    status, stderr = 0, io.StringIO()
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    with redirect_stdout(io.StringIO()), redirect_stderr(stderr):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                stderr.write(f"{end.code}\n")
        except BaseException:  # noqa: BLE001 - it is told
            traceback.print_exc()
            status = 1
    sys.path.pop(0)
    return status, stderr.getvalue()


if __name__ == "__main__":
    # What children of the scripts print is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        print(json.dumps(run(script, arguments)), file=answers, flush=True)

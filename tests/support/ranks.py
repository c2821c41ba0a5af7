"""Gloo processes of one test: started once, each writes what it found as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


def run_ranks(script: str, world: int, folder: Path, *arguments: str, timeout: float = 300.0) -> list[Any]:
    """What each of so many processes of ``script RANK WORLD FOLDER *arguments`` wrote to ``FOLDER/RANK.json``."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, str(SUPPORT / script)]
    processes = []
    for rank in range(world):
        with (folder / f"{rank}.log").open("w") as log:
            own = [*command, str(rank), str(world), str(folder), *arguments]
            processes.append(subprocess.Popen(own, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(world))
    assert codes == [0] * world, logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

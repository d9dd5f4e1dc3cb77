"""Daemons that a killed run has left: ended by rule, and only when nobody works through them."""

from __future__ import annotations

from collections.abc import Callable

from mps_trainer.errors import PlacementError
from mps_trainer.mps.control import CONTROL_BINARY, MpsDaemon
from mps_trainer.mps.folder import all_mps_folders


def sweep_daemons(is_run_alive: Callable[[str], bool], binary: str = CONTROL_BINARY) -> tuple[list[str], list[str]]:
    """End what dead runs of this user have left.

    Returns:
        (removed, kept): the run ids of the folders that are gone, and of those whose daemon still has clients or does
        not answer: a client of a dead run may be an engine that goes on, so nothing is taken from under it.
    """
    removed: list[str] = []
    kept: list[str] = []
    for run_id, folder in all_mps_folders():
        if is_run_alive(run_id):
            continue
        daemon = MpsDaemon(folder, binary)
        (removed if _end_if_unused(daemon) else kept).append(run_id)
    return removed, kept


def _end_if_unused(daemon: MpsDaemon) -> bool:
    if daemon.find() is None:
        daemon.folder.remove()
        return True
    try:
        return not daemon.clients() and daemon.quit()
    except PlacementError:
        return False

"""For entry points in vLLM's group `vllm.stat_logger_plugins`: a class that exists only where it is wanted.

vLLM turns its statistics on for every asynchronous engine of an environment in which such a plugin loads, whoever's
engine it is. So the attribute that the entry point names must not exist elsewhere. vLLM goes on without it (it guards
this very load), and its complaint about that is kept out of the log.

    entry point > the module's `__getattr__` > wanted here? > a class, or an AttributeError of which nobody is told
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

#: The logger of vLLM's that says which plugin did not load.
_LOADER = "vllm.plugins"


class NotWantedError(AttributeError):
    """Nobody wants this entry point's class in this process."""


def quiet_entry_point(module: str, name: str, make: Callable[[], type]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose attribute `name` is the class that `make` returns.

    Args:
        make: raises NotWantedError, with the reason, where there shall be no class.
    """

    def attribute(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {module!r} has no attribute {asked!r}")
        try:
            return make()
        except NotWantedError:
            # Adding it again changes nothing: a logger keeps a filter once.
            logging.getLogger(_LOADER).addFilter(_is_no_complaint_about_us)
            raise

    return attribute


def _is_no_complaint_about_us(entry: logging.LogRecord) -> bool:
    return not (entry.exc_info and isinstance(entry.exc_info[1], NotWantedError))

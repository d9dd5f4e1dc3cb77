"""From recorded experiences to rows, and what a person should know about the columns on the way."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from mps_trainer.columns import Column, PackedBatch, Rows
from mps_trainer.errors import ExperienceError
from mps_trainer.operator.extract import BATCH_SOURCES, ExperienceLike, Extractor
from mps_trainer.operator.recording import RecordedExperience
from mps_trainer.transport import decode_batch, encode_batch

_FIELDS = frozenset(f.name for f in fields(RecordedExperience)) - {"eid", "info", "metrics"}
_ALWAYS = frozenset({"prompt_tokens", "response_tokens", *BATCH_SOURCES})
_EID = frozenset(f"eid.{key}" for key in ("uid", "tid", "rid", "sid", "batch", "task", "run", "step", "suffix"))
#: Fields that an experience has, with nothing in them where an operator sees it.
_NONE_THERE = frozenset({"advantages", "returns"})


@dataclass
class Extraction:
    """The rows of all experiences that can be fed.

    Attributes:
        rows: n rows of each column.
        seen: experiences looked at, n of them usable.
        problems: column -> how many lack it.
        cut: sequences that were longer than their column's maximum.
    """

    rows: dict[str, list[object]]
    seen: int = 0
    size: int = 0
    cut: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    first_problem: str = ""

    def pack(self, columns: Sequence[Column], chosen: Iterable[int]) -> PackedBatch:
        """The chosen rows through the very bytes that a run would send."""
        chosen = list(chosen)
        rows: Rows = {
            column.name: np.asarray([self.rows[column.name][i] for i in chosen], column.dtype)
            if column.kind == "scalar"
            else [self.rows[column.name][i] for i in chosen]  # type: ignore[misc]
            for column in columns
        }
        return decode_batch(encode_batch(rows, columns), columns)

    def split(self, share: float = 0.1) -> tuple[list[int], list[int]]:
        """(trained on, held out): the last share of the rows is held out, in whole groups where there are several.

        Runs of one task resemble each other, so a task on both sides would flatter the model.
        """
        first = min(self.size - 1, max(1, round(self.size * (1 - share))))
        groups = self.rows["group"]
        before = set(groups[:first])
        later = [i for i in range(first, self.size) if groups[i] not in before]
        held = set(later) if later else set(range(first, self.size))
        return [i for i in range(self.size) if i not in held], sorted(held)


def extract(columns: Sequence[Column], batches: Iterable[Sequence[ExperienceLike]]) -> Extraction:
    """Read the columns out of each batch, as the operator does."""
    extractor = Extractor(columns)
    out = Extraction({column.name: [] for column in columns})
    for batch in batches:
        extracted = extractor(batch)
        for name, values in extracted.rows.items():
            out.rows[name].extend(values)
        out.seen += len(batch)
        out.size += len(extracted.fed)
        out.cut += extracted.cut
        out.problems.update(extracted.problems)
        out.first_problem = out.first_problem or extracted.first_problem
    return out


def check_sources(columns: Sequence[Column], experiences: Sequence[ExperienceLike]) -> list[str]:
    """Sentences about optional columns that nothing feeds. ExperienceError for a required one that no experience has.

    Without experiences only names that Trinity's experience cannot have are found.
    """
    there = _sources(experiences)
    warnings = []
    for column in columns:
        source = column.source
        if source in _NONE_THERE:
            found = f"column {column.name!r} reads {source}, which is None where the operator stands"
            todo = "use reward or token_level_reward: Trinity computes advantages after its operators"
        elif source in there or (not experiences and source.partition(".")[0] in ("info", "metrics")):
            continue
        else:
            having = f"none of the {len(experiences)} experiences has" if experiences else "no experience has"
            found = f"column {column.name!r} reads {source}, which {having}"
            todo = _nearest(source, there)
        if column.required:
            raise ExperienceError(found, todo)
        warnings.append(f"{found}, so it is always empty; {todo}")
    return warnings


def _sources(experiences: Sequence[ExperienceLike]) -> set[str]:
    found = {*_ALWAYS, *_EID}
    if not experiences:
        return found | _FIELDS
    for experience in experiences:
        found |= {name for name in _FIELDS if getattr(experience, name, None) is not None}
        found |= {f"info.{key}" for key in experience.info}
        found |= {f"metrics.{key}" for key in experience.metrics}
    return found


def _nearest(source: str, there: set[str]) -> str:
    close = difflib.get_close_matches(source, there, n=1, cutoff=0.6)
    # `hidden_state` for `info.hidden_state` is the commonest slip.
    close = [name for name in sorted(there) if name.endswith(f".{source}")][:1] or close
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(sorted(there))}"

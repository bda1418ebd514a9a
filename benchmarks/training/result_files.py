"""Files of finished runs: one per run until the table is complete, then one per table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collect_results import common_value, write, write_collected
from trainings import TRAININGS, PlannedRun


@dataclass(frozen=True)
class ResultFiles:
    """``TABLE/summary.json`` and ``TABLE/runs/RUN.json`` in some folders.

    Attributes:
        target: Folder that files are written to.
        others: Further folders to read, with results of earlier machines.
    """

    target: Path
    others: tuple[Path, ...] = ()

    def is_done(self, run: PlannedRun) -> bool:
        """True if a run has results, in its file or in its table's file."""
        return self.part(run) is not None or (run.variant, run.seed) in _rows(self.whole(run.table))

    def part(self, run: PlannedRun) -> Path | None:
        """Return the file of a run, or None."""
        paths = (_part(folder, run) for folder in self._folders())
        return next((path for path in paths if path.is_file()), None)

    def whole(self, table: str) -> dict[str, Any]:
        """Return the content of a table's file, or a table without runs if there is no file."""
        for folder in self._folders():
            path = folder / table / "summary.json"
            if path.is_file():
                return _read(path)
        return {"runs": []}

    def add(self, run: PlannedRun, folder: Path, commit: str, side_by_side: int) -> Path:
        """Write the file of a finished run.

        Args:
            run: The run.
            folder: Folder where it was trained.
            commit: Commit of the run.
            side_by_side: Number of runs that shared the device.
        """
        path = _part(self.target, run)
        write_collected([folder], path, commit, side_by_side)
        return path

    def merge(self, table: str) -> Path | None:
        """Write the file of a table whose runs are all done, and delete the files of its runs.

        Returns:
            The table's file; ``None`` if runs are missing or nothing is new.

        Raises:
            ValueError: If hardware or versions differ.
        """
        runs = TRAININGS[table].runs(table)
        parts = {run: path for run in runs if (path := self.part(run)) is not None}
        if not parts or not all(map(self.is_done, runs)):
            return None
        earlier = self.whole(table)
        files = {path: _read(path) for path in parts.values()}
        replaced = {(run.variant, run.seed) for run in parts}
        kept = [row for row in earlier["runs"] if (row["variant"], row["seed"]) not in replaced]
        contents = [{**earlier, "runs": kept}] if kept else []
        order = {(run.variant, run.seed): place for place, run in enumerate(runs)}
        target = self.target / table / "summary.json"
        write(target, merged([*contents, *files.values()], order))
        for path in files:
            if self.target in path.parents:
                path.unlink()
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
        return target

    def _folders(self) -> tuple[Path, ...]:
        return (self.target, *self.others)


def merged(
    contents: Sequence[Mapping[str, Any]], order: Mapping[tuple[str, int], int]
) -> dict[str, Any]:
    """Merge the contents of files; values that differ between files go to the rows of their runs.

    Args:
        contents: Contents of files.
        order: Place of each run, by variant and seed.

    Raises:
        ValueError: If recipe, hardware or versions differ.
    """
    head = {
        name: common_value([content[name] for content in contents], name)
        for name in ("recipe", "hardware", "versions")
    }
    commits = list(dict.fromkeys(content["commit"] for content in contents))
    shared = {content["side_by_side"] for content in contents}
    rows = []
    for content in contents:
        for row in content["runs"]:
            if len(commits) > 1:
                row = {**row, "commit": row.get("commit", content["commit"])}
            if len(shared) > 1:
                side_by_side = row.get("side_by_side", content["side_by_side"])
                row = {**row, "side_by_side": side_by_side}
            rows.append(row)
    last = len(order)
    rows.sort(key=lambda row: order.get((row["variant"], row["seed"]), last))
    return {**head, "commit": ", ".join(commits), "side_by_side": max(shared), "runs": rows}


def _part(folder: Path, run: PlannedRun) -> Path:
    return folder / run.table / "runs" / f"{run.name}.json"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _rows(content: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(row["variant"], row["seed"]) for row in content["runs"]}

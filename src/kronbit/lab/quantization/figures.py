"""The paper's figures about quantisation, for its synthetic matrix or a matrix of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronbit.lab.errors import LabError
from kronbit.lab.files import make_folder, write_bytes
from kronbit.lab.quantization.errors import contraction, rectification, singular_values
from kronbit.lab.quantization.report import ErrorReport, Study, Tell
from kronbit.lab.report import drawing
from kronbit.quantization.mappings import codebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Quantised quantities: A is grey, eigenvectors are blue, the triangular factor is orange.
_LINES: dict[str, dict[str, Any]] = {
    "A": {"color": drawing.GREY, "linestyle": drawing.DASHED, "marker": "s"},
    "U": {"color": drawing.PALE_BLUE, "linestyle": drawing.DOTTED, "marker": "^"},
    "U, rectified": {"color": drawing.BLUE, "linestyle": "-", "marker": "o"},
    "C": {"color": drawing.ORANGE, "linestyle": "-", "marker": "D"},
}
_IN_LEGENDS = {label: label for label in _LINES} | {"C": "C, the factor"}
# Colors of bars by the first word of their labels.
_COLORS = {"A": drawing.GREY, "U": drawing.BLUE, "B": drawing.INK, "C": drawing.ORANGE}
_COLORS |= {"naive": drawing.GREY, "eigen": drawing.BLUE, "cholesky": drawing.ORANGE}
# Attributes of Deviation, and their labels on axes.
_METRICS = {"nre": "relative error (NRE)", "angle": "angle in degrees"}


def draw_errors(report: ErrorReport, folder: Path, tell: Tell = lambda text: None) -> list[Path]:
    """Draw all figures of the first matrix of a report as PNG files, and return their paths.

    ``tell`` is called with the name of each file before it is drawn, to show progress.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if not report.studies:
        raise LabError(f"{report.source} has no matrix to draw: ask for at least one")
    draw: dict[str, Callable[[Figure, Study], None]] = {
        "mapping": _draw_mappings,
        "errors": _draw_bars,
        "contraction": _draw_contraction,
        "rectification": _draw_rectification,
        "singular_values": _draw_singular_values,
    }
    make_folder(folder)
    paths = [folder / f"{name}.png" for name in draw]
    with mpl.rc_context({**mpl.rcParamsDefault, **drawing.STYLE, "backend": "Agg"}):
        for path, fill in zip(paths, draw.values(), strict=True):
            tell(path.name)
            figure = Figure(layout="constrained")
            fill(figure, report.studies[0])
            write_bytes(path, drawing.to_png(figure))
    return paths


def _draw_mappings(figure: Figure, _: Study) -> None:
    """Draw the codebooks of both mappings at 3 and 4 bits."""
    panels = _panels(figure, 1, 2, 3.2)
    looks = {"dt": _LINES["A"], "linear2": _LINES["U, rectified"]}
    for panel, bits in zip(panels[0], (3, 4), strict=True):
        for mapping, look in looks.items():
            values = codebook(mapping, bits).tolist()
            panel.plot(values, **look, markersize=4, linewidth=1.2, label=mapping)
        panel.set_title(f"{bits} bits", fontsize=9)
        panel.set(xlabel="code", xticks=range(0, 2**bits, bits - 2), ylim=(-1.08, 1.08))
    panels[0][0].set_ylabel("value / largest value of the block")
    panels[0][0].legend(loc="upper left")


def _draw_bars(figure: Figure, study: Study) -> None:
    """Draw NRE and angle of every way to store the matrix, at the lowest number of bits."""
    from matplotlib.patches import Patch

    bits = min(row.bits for row in study.rows)
    rows = [row for row in study.rows if row.bits == bits]
    labels = list(dict.fromkeys(row.label for row in rows))
    mappings = list(dict.fromkeys(row.mapping for row in rows))
    title = f"Errors of the inverse root at {bits} bits: {study.name}"
    panels = _panels(figure, 1, 2, 0.9 + 0.27 * len(labels), title, sharey=True)
    height = 0.8 / len(mappings)
    shades = []
    for i, mapping in enumerate(mappings):
        # Mappings differ in lightness, as colors stand for the quantised quantity.
        alpha = 0.45 if i else 1
        shades.append(Patch(color=drawing.INK, alpha=alpha, label=mapping))
        errors = {row.label: row.whole for row in rows if row.mapping == mapping}
        for panel, metric in zip(panels[0], _METRICS, strict=True):
            panel.barh(
                [place + (i + 0.5) * height - 0.4 for place in range(len(labels))],
                [getattr(errors[label], metric) for label in labels],
                height=0.92 * height,
                color=[_COLORS[re.split(r"\W", label)[0]] for label in labels],
                alpha=alpha,
            )
    for panel, metric in zip(panels[0], _METRICS.values(), strict=True):
        panel.set_xlabel(metric)
        drawing.label_rows(panel, labels)
    panels[0][1].legend(handles=shades, loc="lower right")


def _draw_contraction(figure: Figure, study: Study) -> None:
    """Draw errors against τ, with and without the diagonal of the root."""
    title = f"Condition {study.statistic.condition:.3g} at τ = 1: {study.name}"
    panels = _panels(figure, 2, 2, 5.0, title, sharex=True)
    rows_of = contraction(study.statistic)
    taus = list(rows_of)
    parts = {"whole": "the root", "off_diagonal": "without its diagonal"}
    for column, (part, heading) in enumerate(parts.items()):
        for panel, metric in zip(panels[:, column], _METRICS, strict=True):
            for rows in zip(*rows_of.values(), strict=True):
                errors = [getattr(getattr(row, part), metric) for row in rows]
                look = _LINES[rows[0].label] | {"label": _IN_LEGENDS[rows[0].label]}
                panel.plot(taus, errors, **look, markersize=3.5)
            panel.set_xscale("log", base=2)
            panel.set(xticks=taus[:: 1 + len(taus) // 8], ylim=(0, None))
        panels[0][column].set_title(heading, fontsize=9)
        panels[1][column].set_xlabel("contraction of the eigenvalues τ")
    for panel, label in zip(panels[:, 0], _METRICS.values(), strict=True):
        panel.set_ylabel(label)
    panels[0][0].legend(loc="upper left", title="quantised to 4 bits")


def _draw_rectification(figure: Figure, study: Study) -> None:
    """Draw errors of powers against the number of Björck steps."""
    ((panel,),) = _panels(figure, 1, 1, 3.4, f"Powers by 4-bit eigenvectors: {study.name}")
    errors_of = rectification(study.statistic)
    for (k, errors), look in zip(errors_of.items(), _LINES.values(), strict=True):
        panel.plot(errors, **look, markersize=4, label=f"s = -1/{k}" if k > 1 else "s = -1")
    panel.set(yscale="log", xlabel="Björck steps t₂", ylabel="mean of |(VΛˢVᵀ)^(-1/s) VΛVᵀ - I|")
    panel.legend(loc="upper right")


def _draw_singular_values(figure: Figure, study: Study) -> None:
    """Draw the singular values of the matrix and of the matrices restored from 4 bits."""
    ((panel,),) = _panels(figure, 1, 1, 3.4, f"Singular values: {study.name}")
    values = singular_values(study.statistic)
    # The smallest values come first, as they matter most for an inverse.
    ranks = range(1, study.statistic.order + 1)
    panel.plot(ranks, values["exact"].tolist(), color=drawing.INK, linewidth=3, label="exact")
    for label, look in _LINES.items():
        line = {**look, "marker": None, "label": _IN_LEGENDS[label]}
        panel.plot(ranks, values[label].tolist(), **line, zorder=3)
    panel.set(xscale="log", yscale="log", xlabel="rank, from the smallest", ylabel="singular value")
    panel.legend(loc="upper left", title="quantised to 4 bits")


def _panels(
    figure: Figure, rows: int, columns: int, height: float, title: str = "", **shared: Any
) -> Any:
    figure.set_size_inches(7.2, height)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left")
    return figure.subplots(rows, columns, squeeze=False, **shared)

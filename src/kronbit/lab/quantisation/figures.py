"""The paper's figures about quantisation, for its synthetic matrix or a matrix of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import (
    Contracted,
    Way,
    contraction,
    label_of,
    rectification,
    singular_values,
)
from kronbit.lab.quantisation.report import ErrorReport, Study
from kronbit.lab.report.drawing import (
    BLUE,
    DASHED,
    DOTTED,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    STYLE,
    to_png,
)
from kronbit.lab.training.files import make_folder, write_bytes
from kronbit.quantization.mappings import codebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Quantised quantities: A is grey, eigenvectors are blue, the triangular factor is orange.
_LINES: dict[Way, dict[str, Any]] = {
    ("A", None): {"color": GREY, "linestyle": DASHED, "marker": "s"},
    ("U", False): {"color": PALE_BLUE, "linestyle": DOTTED, "marker": "^"},
    ("U", True): {"color": BLUE, "linestyle": "-", "marker": "o"},
    ("C", None): {"color": ORANGE, "linestyle": "-", "marker": "D"},
}
# Attributes of Deviation, and their labels on axes.
_METRICS = {"nre": "relative error (NRE)", "angle": "angle in degrees"}
_WIDTH = 7.2


def draw_errors(
    report: ErrorReport, folder: Path, tell: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Draw all figures of the first matrix of a report.

    Args:
        report: The report.
        folder: Folder of the PNG files, created if it does not exist.
        tell: Called with the name of each file before it is drawn, to show progress.

    Returns:
        Paths of the files.

    Raises:
        LabError: If the report has no matrix, or the files cannot be written.
    """
    import matplotlib as mpl

    if not report.studies:
        raise LabError(f"{report.source} has no matrix to draw: ask for at least one")
    study = report.studies[0]
    draw: dict[str, Callable[[], Figure]] = {
        "mapping": draw_mappings,
        "errors": lambda: draw_bars(study),
        "contraction": lambda: draw_contraction(study, contraction(study.statistic)),
        "rectification": lambda: draw_rectification(study, rectification(study.statistic)),
        "singular_values": lambda: draw_singular_values(study),
    }
    make_folder(folder)
    paths = []
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "backend": "Agg"}):
        for name, figure in draw.items():
            tell(f"{name}.png")
            paths.append(folder / f"{name}.png")
            write_bytes(paths[-1], to_png(figure()))
    return paths


def draw_mappings() -> Figure:
    """Draw the codebooks of both mappings at 3 and 4 bits."""
    figure, panels = _figure(1, 2, 3.2)
    looks = {"dt": _LINES["A", None], "linear2": _LINES["U", True]}
    for panel, bits in zip(panels[0], (3, 4), strict=True):
        for mapping, look in looks.items():
            values = codebook(mapping, bits).tolist()
            panel.plot(values, **look, markersize=4, linewidth=1.2, label=mapping)
        panel.set_title(f"{bits} bits", fontsize=9)
        panel.set(xlabel="code", xticks=range(0, 2**bits, bits - 2), ylim=(-1.08, 1.08))
    panels[0][0].set_ylabel("value, of the block's largest")
    panels[0][0].legend(loc="upper left")
    return figure


def draw_bars(study: Study) -> Figure:
    """Draw NRE and angle of every way to store the matrix, at the lowest number of bits."""
    from matplotlib.patches import Patch

    bits = min(row.bits for row in study.rows)
    rows = [row for row in study.rows if row.bits == bits]
    keys = list(dict.fromkeys(row.key for row in rows))
    # Mappings differ in lightness, as colors stand for the quantised quantity.
    alphas = dict.fromkeys(dict.fromkeys(row.mapping for row in rows), 0.45)
    alphas[rows[0].mapping] = 1
    figure, panels = _figure(1, 2, 0.9 + 0.27 * len(keys), sharey=True)
    height = 0.8 / len(alphas)
    for panel, (metric, label) in zip(panels[0], _METRICS.items(), strict=True):
        for i, (mapping, alpha) in enumerate(alphas.items()):
            errors = {row.key: row.whole for row in rows if row.mapping == mapping}
            panel.barh(
                [place + (i + 0.5) * height - 0.4 for place in range(len(keys))],
                [getattr(errors[key], metric) for key in keys],
                height=0.92 * height,
                color=[_color(way) for way, _ in keys],
                alpha=alpha,
            )
        panel.set_xlabel(label)
        panel.grid(visible=False, axis="y")
        panel.tick_params(axis="y", length=0)
    panels[0][0].set_yticks(range(len(keys)), map(label_of, keys))
    panels[0][0].set_ylim(len(keys) - 0.4, -0.6)
    shades = [Patch(color=INK, alpha=alpha, label=mapping) for mapping, alpha in alphas.items()]
    panels[0][1].legend(handles=shades, loc="lower right")
    return _titled(figure, f"Errors of the inverse root at {bits} bits: {study.name}")


def draw_contraction(study: Study, points: Sequence[Contracted]) -> Figure:
    """Draw errors against τ, with and without the diagonal of the root."""
    figure, panels = _figure(2, 2, 5.0, sharex=True)
    taus = [point.tau for point in points]
    parts = {"whole": "the root", "off_diagonal": "without its diagonal"}
    for column, (part, title) in enumerate(parts.items()):
        for panel, metric in zip(panels[:, column], _METRICS, strict=True):
            for rows in zip(*(point.rows for point in points), strict=True):
                panel.plot(
                    taus,
                    [getattr(getattr(row, part), metric) for row in rows],
                    **_LINES[rows[0].key],
                    markersize=3.5,
                    label=_label(rows[0].key),
                )
            panel.set_xscale("log", base=2)
            panel.set_xticks(taus[:: 1 + len(taus) // 8])
            panel.set_ylim(bottom=0)
        panels[0][column].set_title(title, fontsize=9)
        panels[1][column].set_xlabel("contraction of the eigenvalues τ")
    for panel, label in zip(panels[:, 0], _METRICS.values(), strict=True):
        panel.set_ylabel(label)
    panels[0][0].legend(loc="upper left", title="quantised to 4 bits")
    return _titled(figure, f"Condition {study.statistic.condition:.3g} at τ = 1: {study.name}")


def draw_rectification(study: Study, errors_of: dict[int, list[float]]) -> Figure:
    """Draw errors of powers against the number of Björck steps."""
    figure, ((panel,),) = _figure(1, 1, 3.4)
    for (k, errors), look in zip(errors_of.items(), _LINES.values(), strict=True):
        panel.plot(errors, **look, markersize=4, label=f"s = -1/{k}" if k > 1 else "s = -1")
    panel.set(yscale="log", xlabel="Björck steps t₂", ylabel="mean of |(VΛˢVᵀ)^(-1/s) VΛVᵀ - I|")
    panel.legend(loc="upper right")
    return _titled(figure, f"Powers by 4-bit eigenvectors: {study.name}")


def draw_singular_values(study: Study) -> Figure:
    """Draw the singular values of the matrix and of the matrices restored from 4 bits."""
    figure, ((panel,),) = _figure(1, 1, 3.4)
    values = singular_values(study.statistic)
    # The smallest values come first, as they matter most for an inverse.
    ranks = range(1, study.statistic.order + 1)
    panel.plot(ranks, values["exact"].tolist(), color=INK, linewidth=3, label="exact", zorder=2)
    for key, look in _LINES.items():
        line = {**look, "marker": None, "label": _label(key)}
        panel.plot(ranks, values[label_of(key)].tolist(), **line, zorder=3)
    panel.set(xscale="log", yscale="log", xlabel="rank, from the smallest", ylabel="singular value")
    panel.legend(loc="upper left", title="quantised to 4 bits")
    return _titled(figure, f"Singular values: {study.name}")


def _label(key: Way) -> str:
    return "C, the factor" if key[0] == "C" else label_of(key)


def _figure(rows: int, columns: int, height: float, **shared: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def _titled(figure: Figure, title: str) -> Figure:
    figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left")
    return figure


def _color(way: str) -> str:
    """Return the color of a quantised quantity or a method."""
    if way == "B":
        return INK
    if way == "C" or way.startswith("cholesky"):
        return ORANGE
    return GREY if way.startswith(("A", "naive")) else BLUE

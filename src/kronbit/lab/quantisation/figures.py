"""The paper's figures about quantisation: of its synthetic matrix, or of one of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronbit.lab.errors import LabError
from kronbit.lab.quantisation.errors import (
    Contracted,
    Deviation,
    contraction,
    rectification,
    singular_values,
)
from kronbit.lab.quantisation.report import ErrorReport, Study
from kronbit.lab.report.drawing import STYLE, to_png
from kronbit.quantization.mappings import codebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By what is quantised: greys for A itself, blues for eigenvectors, orange for the factor.
_GREY, _BLUE, _PALE, _ORANGE, _DARK = "#8a8f98", "#3b6ea8", "#8ab6e0", "#e08a3c", "#2b3038"
_DASHED, _DOTTED = (0, (5, 1.5)), (0, (1.2, 1.2))
_LINES: dict[tuple[str, bool | None], tuple[str, str, Any, str]] = {
    ("A", None): ("A", _GREY, _DASHED, "s"),
    ("U", False): ("U", _PALE, _DOTTED, "^"),
    ("U", True): ("U, rectified", _BLUE, "-", "o"),
    ("C", None): ("C, the factor", _ORANGE, "-", "D"),
}
_WIDTH = 7.2


def draw_errors(
    report: ErrorReport, folder: Path, tell: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Draw all figures of the first matrix that was studied.

    Args:
        report: What was found.
        folder: Where the PNG files go; it is made.
        tell: Takes what is being drawn, for a line of progress.

    Returns:
        The files.

    Raises:
        LabError: If no matrix was studied, or the files cannot be written.
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
    paths = []
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "backend": "Agg"}):
        for name, figure in draw.items():
            tell(f"{name}.png")
            path = folder / f"{name}.png"
            content = to_png(figure())
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except OSError as error:
                raise LabError(f"cannot write {path}: {error.strerror}") from error
            paths.append(path)
    return paths


def draw_mappings() -> Figure:
    """The codebooks of both mappings at 3 and 4 bits."""
    figure, axes = _figure(1, 2, 3.2)
    for number, bits in enumerate((3, 4)):
        panel = axes[0][number]
        for mapping, colour, marker in (("dt", _GREY, "s"), ("linear2", _BLUE, "o")):
            values = codebook(mapping, bits).tolist()
            panel.plot(
                range(len(values)),
                values,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.2,
                linestyle="-" if mapping == "linear2" else _DASHED,
                label=mapping,
            )
        panel.set_title(f"{bits} bits", fontsize=9)
        panel.set_xlabel("code")
        panel.set_xticks(range(0, 2**bits, bits - 2))
        panel.set_ylim(-1.08, 1.08)
    axes[0][0].set_ylabel("value, of the block's largest")
    axes[0][0].legend(loc="upper left")
    return figure


def draw_bars(study: Study) -> Figure:
    """NRE and angle of every way to keep the matrix, at the fewest bits of the table."""
    bits = min(row.bits for row in study.rows)
    rows = [row for row in study.rows if row.bits == bits]
    ways = list(dict.fromkeys((row.way, row.rectified) for row in rows))
    mappings = list(dict.fromkeys(row.mapping for row in rows))
    figure, axes = _figure(1, 2, 0.9 + 0.27 * len(ways), sharey=True)
    height = 0.8 / len(mappings)
    for number, (panel, pick) in enumerate(zip(axes[0], (_nre, _angle), strict=True)):
        for i, mapping in enumerate(mappings):
            own = {(row.way, row.rectified): row for row in rows if row.mapping == mapping}
            panel.barh(
                [place + (i + 0.5) * height - 0.4 for place in range(len(ways))],
                [pick(own[way].whole) for way in ways],
                height=0.92 * height,
                color=[_colour(*way) for way in ways],
                # By lightness, whatever the colour.
                alpha=1 if i == 0 else 0.45,
                label=mapping,
            )
        panel.set_xlabel(("relative error (NRE)", "angle in degrees")[number])
        panel.grid(visible=False, axis="y")
        panel.tick_params(axis="y", length=0)
    names = [f"{way}, rectified" if rectified else way for way, rectified in ways]
    axes[0][0].set_yticks(range(len(ways)), names)
    axes[0][0].set_ylim(len(ways) - 0.4, -0.6)
    from matplotlib.patches import Patch

    shades = [Patch(color=_DARK, alpha=1 if i == 0 else 0.45) for i in range(len(mappings))]
    axes[0][1].legend(shades, mappings, loc="lower right")
    return _titled(figure, f"Errors of the inverse root at {bits} bits: {study.name}")


def draw_contraction(study: Study, found: Sequence[Contracted]) -> Figure:
    """Errors against τ, with and without the diagonal of the root."""
    figure, axes = _figure(2, 2, 5.0, sharex=True)
    for column, part in enumerate(("whole", "off_diagonal")):
        for line, pick in enumerate((_nre, _angle)):
            panel = axes[line][column]
            for way, rectified in dict.fromkeys(
                (row.way, row.rectified) for own in found for row in own.rows
            ):
                label, colour, style, marker = _LINES[way, rectified]
                values = [
                    pick(getattr(row, part))
                    for own in found
                    for row in own.rows
                    if (row.way, row.rectified) == (way, rectified)
                ]
                panel.plot(
                    [own.tau for own in found],
                    values,
                    color=colour,
                    linestyle=style,
                    marker=marker,
                    markersize=3.5,
                    label=label,
                )
            panel.set_xscale("log", base=2)
            panel.set_xticks([own.tau for own in found][:: 1 + len(found) // 8])
            panel.set_ylim(bottom=0)
        axes[0][column].set_title(("the root", "without its diagonal")[column], fontsize=9)
        axes[1][column].set_xlabel("contraction of the eigenvalues τ")
    axes[0][0].set_ylabel("relative error (NRE)")
    axes[1][0].set_ylabel("angle in degrees")
    axes[0][0].legend(loc="upper left", title="quantised to 4 bits")
    return _titled(figure, f"Condition {study.condition:.3g} at τ = 1: {study.name}")


def draw_rectification(study: Study, found: dict[int, list[float]]) -> Figure:
    """Errors of powers against the number of Björck's steps."""
    figure, axes = _figure(1, 1, 3.4)
    panel = axes[0][0]
    shown = ((_GREY, _DASHED, "s"), (_PALE, _DOTTED, "^"), (_BLUE, "-", "o"), (_ORANGE, "-", "D"))
    for (k, errors), (colour, style, marker) in zip(found.items(), shown, strict=True):
        panel.plot(
            range(len(errors)),
            errors,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=4,
            label=f"s = -1/{k}" if k > 1 else "s = -1",
        )
    panel.set_yscale("log")
    panel.set_xlabel("Björck steps t₂")
    panel.set_ylabel("mean of |(VΛˢVᵀ)^(-1/s) VΛVᵀ - I|")
    panel.legend(loc="upper right")
    return _titled(figure, f"Powers by 4-bit eigenvectors: {study.name}")


def draw_singular_values(study: Study) -> Figure:
    """Singular values of the matrix, and of what 4 bits leave of it."""
    figure, axes = _figure(1, 1, 3.4)
    panel = axes[0][0]
    found = singular_values(study.statistic)
    ranks = range(1, study.order + 1)  # from the smallest, which matter most to an inverse
    panel.plot(ranks, found["exact"].tolist(), color=_DARK, linewidth=3, label="exact", zorder=2)
    for (way, rectified), (label, colour, style, _) in _LINES.items():
        values = found[f"{way}, rectified" if rectified else way].tolist()
        panel.plot(ranks, values, color=colour, linestyle=style, label=label, zorder=3)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("rank, from the smallest")
    panel.set_ylabel("singular value")
    panel.legend(loc="upper left", title="quantised to 4 bits")
    return _titled(figure, f"Singular values: {study.name}")


def _figure(
    rows: int, columns: int, height: float, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)


def _titled(figure: Figure, title: str) -> Figure:
    figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, ha="left")
    return figure


def _nre(errors: Deviation) -> float:
    return errors.nre


def _angle(errors: Deviation) -> float:
    return errors.angle


def _colour(way: str, rectified: bool | None) -> str:
    """Of a bar: by what is quantised in it."""
    if way.startswith("naive"):
        return _GREY
    if way.startswith("cholesky"):
        return _ORANGE
    if way.startswith("eigen"):
        return _BLUE
    if way == "B":
        return _DARK
    return _GREY if way.startswith("A") else _ORANGE if way == "C" else _BLUE

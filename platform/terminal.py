"""What a command leaves on the terminal: the table of scores, the configuration, the doctor's screen."""

from typing import Any

from rich.table import Table

from mcis.platform.config import Config
from mcis.platform.doctor import Check
from mcis.platform.pipeline import RunResult
from mcis.platform.progress import console
from mcis.platform.settings import Resolved, leaves

_STATES = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red]"}


def meaning(score: dict[str, Any]) -> str:
    """What a score means, in words: threshold, cue, scales, mirror, CRF, ignored share."""
    parts = []
    if score["threshold"] is not None:
        parts.append(f"threshold {score['threshold']:.3f}")
    elif score["background_cue"]:
        parts.append(f"background: {score['background_cue']}")
    if score["ignored_share"] is not None:
        parts.append(f"{100 * score['ignored_share']:.1f} % ignored in training, all scored")
    if score["scales"]:
        parts.append("scales " + " ".join(f"{s:g}" for s in score["scales"]) + (", mirror" if score["mirror"] else ""))
    if score["crf"] is not None:
        parts.append("dense CRF" if score["crf"] else "no CRF")
    return ", ".join(parts)


def score_table(scores: list[dict[str, Any]], title: str) -> Table:
    """The scores of a run as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "which", "split", "mIoU %", "images", "meaning"):
        table.add_column(column, justify="right" if column in ("mIoU %", "images") else "left")
    for s in scores:
        table.add_row(
            s["what"].replace("_", " "), s["name"], s["split"], f"{s['miou']:.2f}", str(s["images"]), meaning(s)
        )
    return table


def show_result(result: RunResult) -> None:
    """The final table of a run, and where to look."""
    context = result.context
    if result.scores:
        console.print(score_table(result.scores, f"Scores of {context.name}"))
    computed = sum(s for stage, s in context.seconds.items() if context.computed[stage])
    console.print(f"{computed:.0f} s in stages that were computed")
    console.print(f"report:  {context.folder / 'report.html'}")
    console.print(f"scores:  {context.folder / 'scores.json'}")
    console.print(f"MLflow:  mcis ui --workspace {context.workspace.root}")


def show_config(resolved: Resolved) -> None:
    """Every key with value, source and meaning."""
    table = Table()
    for column in ("key", "value", "from", "meaning"):
        table.add_column(column, overflow="fold")
    about = dict(_descriptions(Config))
    for key, value in leaves(resolved.config):
        table.add_row(key, str(value), resolved.sources[key], about[key])
    console.print(table)


def _descriptions(section: type[Any], prefix: str = "") -> list[tuple[str, str]]:
    out = []
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            out += _descriptions(field.annotation, f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", field.description or ""))
    return out


def show_checks(checks: list[Check]) -> None:
    """The doctor's screen."""
    table = Table(title="Is this machine fit for mcis?", title_justify="left")
    for column in ("part", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.part, _STATES[check.state], check.found, check.remedy)
    console.print(table)

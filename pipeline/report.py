"""The report of a run: one self-contained HTML page with pictures, and the same numbers as JSON.

`collect_report` reads a run folder into one plain dict; the page, its charts, report.json and the lines
that the terminal prints are all drawn from that dict and from nothing else, so they cannot disagree.
The page needs no script and no network. Any stage may be missing; its section then says so. The same
run folder always gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache_schema.storage import Location, is_remote, join, open_storage
from pipeline.errors import PipelineError
from pipeline.folder import CACHE, EVALUATE, RECIPE, RESPONSES, TRAIN
from pipeline.page import render_page
from pipeline.report_evaluate import drafter_numbers, read_against, read_evaluate, side_by_side
from pipeline.report_sections import Dropped, read_cache, read_responses, read_stages, read_train
from pipeline.report_summary import summary_lines
from pipeline.report_values import as_dict, finite, number, read_json

__all__ = ["REPORT_VERSION", "collect_report", "render_report", "summary_lines", "write_report"]

REPORT_VERSION = 1


def collect_report(
    run: Location, recipe: dict[str, Any] | None = None, against: Path | None = None
) -> dict[str, Any]:
    """Everything the report says, read from a run folder.

    Args:
        run: the run folder, or its URL; any stage may be missing or half done.
        recipe: the resolved recipe; None reads it from `recipe.json` in the run folder.
        against: `results.json` of another run, to set beside this one's evaluation.

    Returns:
        A dict of plain JSON values: `run`, `recipe`, `headline`, `responses`, `cache`, `train`, `evaluate`
        (each None when that stage has left nothing yet), `against`, `stages`, `dropped` and `problems`.

    Raises:
        PipelineError: the run folder does not exist, or `against` holds no results.
    """
    if not (is_remote(run) or Path(run).is_dir()):
        raise PipelineError(f"{run}: no such run folder, so there is nothing to report; run `dflash run RECIPE` first")
    problems: list[str] = []
    dropped = Dropped()
    settings = finite(recipe) if recipe is not None else read_json(join(run, RECIPE), problems)
    cache = as_dict(as_dict(settings).get("cache")).get("path") or join(run, CACHE)
    report: dict[str, Any] = {
        "report_version": REPORT_VERSION,
        "run": str(run),
        "recipe": settings,
        "headline": {},
        "responses": read_responses(join(run, RESPONSES), dropped, problems),
        "cache": read_cache(cache, dropped, problems),
        "train": read_train(join(run, TRAIN), problems),
        "evaluate": read_evaluate(join(run, EVALUATE), problems),
        "against": None,
        "stages": read_stages(run, problems),
        "dropped": dropped.rows(),
        "problems": problems,
    }
    if against is not None:
        there = read_against(against)
        report["against"] = side_by_side(report["evaluate"], there, str(against)) if report["evaluate"] else None
    report["headline"] = headline(report)
    return report


def headline(report: dict[str, Any]) -> dict[str, Any]:
    """The few numbers that a reader wants first; None where the run does not give them yet."""
    evaluate = as_dict(report["evaluate"])
    drafters = as_dict(evaluate.get("drafters"))
    trained, untrained = as_dict(drafters.get("trained")), as_dict(drafters.get("untrained"))
    speeds = ("tokens_per_s", "plain_tokens_per_s", "speedup", "identical", "ties", "prompts")
    return {
        "tau": number(trained.get("tau")),
        "tau_untrained": number(untrained.get("tau")),
        "block_size": number(evaluate.get("block_size")),
        **{name: number(trained.get(name)) for name in speeds},
        "cache_bytes": as_dict(report["cache"]).get("bytes"),
        "seconds": sum(stage["seconds"] or 0 for stage in report["stages"]),
        "dropped": sum(row["count"] for row in report["dropped"] if not row["kept"]),
    }


def render_report(report: dict[str, Any]) -> str:
    """The HTML page of a collected report."""
    from pipeline.charts import draw_charts

    charts = {chart.name: chart for chart in draw_charts(report)}
    drafters = report["evaluate"]["drafters"] if report["evaluate"] else {}
    trained = drafters.get("trained") or drafter_numbers({})
    return render_page("report.html.j2", r=report, h=report["headline"], trained=trained, charts=charts)


def write_report(run: Location, recipe: dict[str, Any] | None = None, against: Path | None = None) -> Location:
    """Write `report.html` and `report.json` into the run folder, each atomically.

    Returns:
        The place of the page.

    Raises:
        PipelineError: as `collect_report`.
    """
    report = collect_report(run, recipe, against)
    page = render_report(report).encode("utf-8", "replace")
    storage = open_storage(run)
    storage.replace("report.json", (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
    storage.replace("report.html", page)
    return join(run, "report.html")

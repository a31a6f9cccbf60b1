"""`dflash check-serve`: the exported drafter in a real server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.cache_cli import JsonOption, say


@click.command("check-serve")
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting: evaluate.threads=2."
)
@click.option(
    "--vllm-python", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PYTHON",
    help="Python of an environment with vLLM; two servers are started with it, one after the other, on this machine.",
)  # fmt: skip
@click.option("--plain", metavar="URL", help="A running server without the drafter, instead of starting one.")
@click.option("--drafted", metavar="URL", help="A running server with the drafter; nobody else may use it meanwhile.")
@click.option(
    "--drafter", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
    help="The drafter's folder; what RECIPE exported unless given.",
)  # fmt: skip
@click.option("--prompts", "n_prompts", type=click.IntRange(1), default=20, show_default=True, help="Prompts, evenly "
              "spread over the evaluation's.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(2), help="Of each answer; the evaluation's unless given.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
              help="The servers' type.")  # fmt: skip
@JsonOption
def check_serve(
    recipe: Path, overrides: tuple[str, ...], vllm_python: Path | None, plain: str | None, drafted: str | None,
    drafter: Path | None, n_prompts: int, max_new_tokens: int | None, dtype: Any, as_json: bool,
) -> None:
    """Serve the target of RECIPE with its exported drafter and without it, and compare: text and acceptance.

    Exit code 1 if a text differs by more than a tie within rounding, or the server accepts more or fewer drafts at a
    position than our own engine does. Writes serve-check/results.json into the run folder.
    """
    from pipeline.folder import EXPORT
    from pipeline.recipe import load_recipe
    from pipeline.run import Run
    from pipeline.serve_check import Serving, check_serving
    from stages.config import require_server_url

    if (plain is None) != (drafted is None) or (plain is None) == (vllm_python is None):
        raise click.UsageError("give --vllm-python to start servers, or --plain and --drafted for running ones")
    for option, url in (("--plain", plain), ("--drafted", drafted)):
        if url is not None:
            require_server_url(option, url)
    run = Run(load_recipe(recipe, overrides), say)
    if drafter is None:
        run.folder.files.fetch_tree(EXPORT)
    folder = drafter or run.folder.export
    if not folder.is_dir():
        raise click.UsageError(f"{folder} is not there; run `dflash export {recipe}` first, or give --drafter FOLDER")
    results = check_serving(run, Serving(
        drafter=folder, vllm_python=None if vllm_python is None else vllm_python.absolute(),
        urls=(plain, drafted) if plain is not None and drafted is not None else None, n_prompts=n_prompts,
        max_new_tokens=max_new_tokens or run.recipe.evaluate.max_new_tokens, dtype=dtype,
    ))  # fmt: skip
    click.echo(json.dumps(results, indent=1) if as_json else "\n".join(served_lines(results)))
    if not results["ok"]:
        sys.exit(1)


def served_lines(results: dict[str, Any]) -> list[str]:
    """The outcome, for a terminal."""
    server = f"vLLM {results['server_version']}" if results["server_version"] else "the server"
    n, same, ties = (results[name] for name in ("prompts", "identical", "ties"))
    lines = [
        f"{server}, {results['dtype']}: {same} of {n} texts with the drafter are equal to those without, {ties} part "
        f"at a tie within rounding, {n - same - ties} differ unexplained; {results['identical_to_ours']} equal ours"
    ]
    for d in results["differences"]:
        gap = "one ends" if d["gap"] is None else f"logits {d['gap']:.2e} apart, a tie up to {d['bound']:.2e}"
        lines.append(f"  {'tie' if d['tie'] else 'BAD'} {d['sample_id']} at token {d['position']}: {gap}")
    found = results["acceptance"]
    if found is None:
        return [*lines, "acceptance was not compared: the server does not count it"]
    lines.append(
        f"τ over cycles: {found['tau']['server']:.3f} there, {found['tau']['ours']:.3f} here "
        f"({found['cycles']['server']} and {found['cycles']['ours']} cycles; {found['same_counts']} of "
        f"{n} prompts counted alike)"
    )
    lines += [
        f"  {'ok ' if p['within'] else 'BAD'} position {p['position']:2d}: {p['server']:.3f} there, "
        f"{p['ours']:.3f} here ({p['low']:.3f}–{p['high']:.3f})"
        for p in found["positions"]
    ]
    return lines

"""Pages from templates: one environment for all of them, so that each escapes and words things alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.report_text import FILTERS, clean


def render_page(template: str, **values: Any) -> str:
    """A template of this folder, filled in. Every text is escaped and cleaned; a name that is missing is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=clean,
    )
    environment.filters.update(FILTERS)
    return environment.get_template(template).render(**values)

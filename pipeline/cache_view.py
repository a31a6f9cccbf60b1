"""What `dflash cache ls`, `info`, `show` and `stats` print: tables from plain dicts.

Sample ids, texts and reasons are other people's: control characters in them are replaced.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.report_text import bytes_text, clean, count_text, number_text, percent_text, seconds_text

_LEFT = ("shard", "state", "array", "type", "problem", "sample", "ledger: sample", "reason", "detail", "identity",
         "value", "compression", "key", "cache", "kind", "note")  # fmt: skip
_OPEN, _CLOSE = "⟦", "⟧"
_WIDTH = 110


def render(*parts: Any, colour: bool = False) -> str:
    """Parts as text, one below the other.

    Args:
        colour: with the codes that colour a terminal.
    """
    stream = io.StringIO()
    console = Console(
        file=stream, width=_width(), force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, highlight=False, legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return stream.getvalue().rstrip()


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return _WIDTH


def wants_colour() -> bool:
    """Whether stdout is a terminal that shows colour; `NO_COLOR` and `FORCE_COLOR` decide where they are set."""
    console = Console()
    return console.is_terminal and not console.no_color and console.color_system is not None


def table(columns: list[str], rows: list[list[Any]]) -> Table:
    """A plain table; words to the left, numbers to the right."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(clean(v))) for v in row))
    return made


def shards_table(found: dict[str, Any]) -> str:
    """`dflash cache ls`."""
    cache = found["cache"]
    rows = [
        [
            s["shard"],
            s["status"],
            s.get("samples", "–"),
            s.get("tokens", "–"),
            bytes_text(s.get("bytes")),
            s.get("dropped", "–"),
            s.get("noted", "–"),
        ]
        for s in found["shards"]
    ]
    identity = cache["identity"]
    total = (
        f"{cache['path']}: {cache['committed_shards']} of {cache['planned_shards']} shards, "
        f"{cache['samples']} samples, {cache['tokens']} tokens, {bytes_text(cache['bytes'])}, "
        f"{cache['dropped']} dropped; ledger: {_ledger_text(cache['ledger'])}\n"
        f"target {clean(identity['target_name'])}, layers {identity['layer_ids']}, {identity['feature_dtype']}, "
        f"fingerprint {cache['fingerprint'][:16]}"
    )
    return render(table(["shard", "state", "samples", "tokens", "bytes", "dropped", "noted"], rows), Text(total))


def info_table(info: dict[str, Any]) -> str:
    """`dflash cache info`."""
    stored, planned, timings = info["stored"], info["planned"], info["timings"]
    facts = [
        ["path", info["path"]],
        ["fingerprint", info["fingerprint"]],
        ["shards", f"{stored['shards']} of {planned['shards']}" + _state_text(info)],
        ["samples", f"{count_text(stored['samples'])} of {count_text(planned['samples'])}"],
        ["tokens", f"{count_text(stored['tokens'])} of {count_text(planned['tokens'])}"],
        ["bytes", f"{bytes_text(stored['bytes'])} ({stored['bytes']:,})"],
        ["features", _compression_text(info["compression"])],
        ["tokens a sample", _lengths_text(info["lengths"])],
        ["ledger", _ledger_text(info["ledger"])],
        ["garbage", f"{info['garbage']['items']} items, {bytes_text(info['garbage']['bytes'])} (`dflash cache gc`)"],
        ["writing", _timings_text(timings)],
    ]
    columns = ["array", "type", "shape", "compression", "plain", "stored"]
    arrays = [_array_row(name, array) for name, array in info["arrays"].items()]
    identity = [[name, number_text(value) if value is not None else "–"] for name, value in info["identity"].items()]
    problems = [[shard, problem] for shard, problem in info["damaged"].items()]
    problems += [[shard, "has a commit marker, but is not in the plan"] for shard in info["strays"]]
    parts = [table(["cache", "value"], facts), Text("")]
    parts += [table(columns, arrays), Text("")]
    parts.append(table(["identity", "value"], identity))
    return render(*parts, *([Text(""), table(["shard", "problem"], problems)] if problems else []))


def _array_row(name: str, array: dict[str, Any]) -> list[str]:
    shape = " × ".join(["rows", *map(str, array["row_shape"])])
    sizes = [bytes_text(array["plain_bytes"]), bytes_text(array["bytes"])]
    return [name, array["dtype"], shape, ", ".join(array["compression"]), *sizes]


def _state_text(info: dict[str, Any]) -> str:
    found = {"missing": info["missing"], "evicted": info["evicted"], "DAMAGED": list(info["damaged"])}
    return "".join(f"; {len(shards)} {name} ({_few(shards)})" for name, shards in found.items() if shards)


def _few(names: list[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (", …" if len(names) > n else "")


def _compression_text(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return "–"
    stored, plain = bytes_text(found["stored_bytes"]), bytes_text(found["bfloat16_bytes"])
    return f"{stored}, {found['ratio']:.3f} of bfloat16 ({plain})"


def _lengths_text(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    names = {"min": "min", "mean": "mean", "p50": "median", "p95": "95 %", "max": "max"}
    return ", ".join(f"{name} {found[key]:,.0f}" for key, name in names.items())


def _ledger_text(found: dict[str, dict[str, int]]) -> str:
    parts = [f"{reason}: " + ", ".join(f"{n} {k}" for k, n in counts.items() if n) for reason, counts in found.items()]
    return "; ".join(parts) or "empty"


def _timings_text(found: dict[str, Any]) -> str:
    if found["writer_mb_per_s"] is None:
        return "–"
    return (
        f"{seconds_text(found.get('total_s'))} of one worker ({found['worker_mb_per_s']} MB/s with the target), of it "
        f"writing, syncing and checking at {found['writer_mb_per_s']} MB/s"
    )


def shard_table(shard: dict[str, Any]) -> str:
    """`dflash cache show SHARD`."""
    plain = "\n".join(f"{k}: {clean(v)}" for k, v in shard.items() if not isinstance(v, dict | list))
    timings = ", ".join(f"{name} {value:g}" for name, value in shard["timings"].items())
    arrays = [
        [name, a["dtype"], a["shape"], a["compression"], bytes_text(a["bytes"])] for name, a in shard["arrays"].items()
    ]
    samples = [[s["sample_id"], s["tokens"]] for s in shard["stored"]]
    ledger = [[r["sample_id"], r["reason"], r["detail"]] for r in shard["ledger"]]
    return render(
        Text(plain + f"\ntimings: {timings}"),
        table(["array", "type", "shape", "compression", "bytes"], arrays),
        table(["sample", "tokens"], samples),
        table(["ledger: sample", "reason", "detail"], ledger) if ledger else Text("ledger: empty"),
    )


def sample_table(view: dict[str, Any], colour: bool) -> str:
    """`dflash cache show SHARD SAMPLE`: what is supervised is green, or in brackets where there is no colour."""
    how = "green" if colour else f"in {_OPEN}brackets{_CLOSE}"
    head = f"{clean(view['sample_id'])} in {view['shard']}: {view['tokens']} tokens, "
    head += f"{view['supervised']} supervised ({how})"
    rows = [
        [r["layer"], f"{r['mean_norm']:.4g}", f"{r['max_norm']:.4g}", f"{r['max_abs']:.4g}",
         "  ".join(f"{v:.3f}" for v in r["head"])]
        for r in view["layers"]
    ]  # fmt: skip
    columns = ["layer", "mean norm", "max norm", "max |x|", "first channels of token 0"]
    parts = [Text(head, style="bold" if colour else ""), Text("")]
    if view["note"]:
        parts.append(Text(clean(view["note"]) + "; these are the ids"))
    return render(*parts, _body(view, colour), Text(""), table(columns, rows), colour=colour)


def _body(view: dict[str, Any], colour: bool) -> Text:
    """The sample's text, or its ids where there is no tokenizer."""
    body = Text()
    for i, run in enumerate(view["runs"]):
        text = clean(run["text"])
        if i and view["token_texts"] is None:
            body.append(" ")
        if not run["supervised"]:
            body.append(text, style="dim" if colour else "")
        else:
            body.append(text if colour else f"{_OPEN}{text}{_CLOSE}", style="green" if colour else "")
    return body


def stats_table(stats: dict[str, Any]) -> str:
    """`dflash cache stats`."""
    columns = ["layer", "norm", "5 %", "median", "95 %", "max", "in 2 % of channels", "peak", "max peak", "kurtosis",
               "cosine to next"]  # fmt: skip
    rows = [
        [
            r["layer"],
            *(f"{r['norm'][key]:.4g}" for key in ("mean", "p5", "p50", "p95", "max")),
            percent_text(r["outlier_share"], 1),
            *(f"{r['peak'][key]:.3g}" for key in ("p50", "max")),
            f"{r['kurtosis']['p50']:.3g}",
            f"{r['cosine_next']['mean']:.3f}" if r["cosine_next"] else "–",
        ]
        for r in stats["layers"]
    ]
    head = (
        f"{stats['path']}: {count_text(stats['samples'])} samples, tokens: {_lengths_text(stats['lengths'])}\n"
        f"layers from {count_text(stats['measured_tokens'])} tokens of {stats['measured_samples']} samples "
        f"(seed {stats['seed']})"
    )
    if stats["zero_tokens"]:
        head += f"; {stats['zero_tokens']} tokens with a state of zero left out"
    foot = (
        f"norm: of a token's state. In 2 % of channels: share of a token's energy in the largest 2 % of the "
        f"{stats['hidden_size']} channels. Peak: largest magnitude over root mean square, median and largest over "
        "tokens. Kurtosis: median; 3 is normal."
    )
    return render(Text(head), Text(""), table(columns, rows), Text(""), Text(foot))

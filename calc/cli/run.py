"""``calc run``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from calc.cli.output import emit, line
from calc.cli.params import INTS, calbin_argument, example, format_option, ints
from calc.cli.text import ms, rate

if TYPE_CHECKING:
    from calc.api import Generation

EXAMPLES = (
    'calc run model.calbin -p "What is the capital of France?" --stats',
    "calc run model.calbin -p - --temperature 0.7 --top-p 0.9 < prompt.txt",
)


@click.command("run", epilog=example(*EXAMPLES))
@calbin_argument
@click.option("-p", "--prompt", help="The prompt; - reads it from stdin.")
@click.option("--prompt-ids", callback=ints(0), metavar=INTS, help="The prompt as token ids.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 keeps all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--no-chat", is_flag=True, help="Do not render the prompt through the model's chat template.")
@click.option(
    "--mode",
    type=click.Choice(["fast", "strict"]),
    default="fast",
    show_default=True,
    help="strict checks every memory access.",
)
@click.option("--stats", is_flag=True, help="Tokens, the target's predicted times and this machine's speed, on stderr.")
@format_option
def command(
    *,
    calbin: Path,
    prompt: str | None,
    prompt_ids: tuple[int, ...] | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    no_chat: bool,
    mode: Literal["fast", "strict"],
    stats: bool,
    fmt: str,
) -> None:
    """Generate text with a calbin on the simulator.

    The text is streamed to stdout.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("give either -p TEXT or --prompt-ids")
    import calc

    given: str | Sequence[int] = prompt_ids if prompt_ids is not None else prompt or ""
    if given == "-":
        given = sys.stdin.read()
    session = calc.Session(calc.open(calbin), mode)
    result = session.generate(
        given,
        max_new_tokens=max_new_tokens,
        sampling=calc.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        chat=not no_chat,
        on_text=None if fmt == "json" else lambda piece: click.echo(piece, nl=False),
    )
    if fmt == "json":
        emit(result)
        return
    has_text = session.spec.tokenizer.kind != "none"
    click.echo() if has_text else line(",".join(str(t) for t in result.tokens))
    if stats:
        _show(result, session.device.target.name)


def _show(g: Generation, target: str) -> None:
    host = len(g.tokens) / g.host_seconds if g.host_seconds else 0.0
    line(f"prompt {g.prompt_tokens} tokens, generated {len(g.tokens)}, finish: {g.finish}", err=True)
    tpot = f"TPOT {ms(g.tpot)} ms ({rate(1 / g.tpot)} tok/s)" if g.tpot else "no decode"
    line(f"{target}, predicted: TTFT {ms(g.ttft)} ms, {tpot}", err=True)
    line(f"simulator on this machine: {rate(host)} tok/s", err=True)

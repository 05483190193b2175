"""`Session`: text in, text out, on a loaded calbin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from calc.calbin.reader import Calbin
from calc.core.errors import Problem, Problems, RuntimeFault, UsageError
from calc.core.spec import Frozen
from calc.sim.machine import Mode
from calc.sim.runtime import Device

Message = Mapping[str, str]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedy at temperature 0, else from the top-p nucleus of the top-k."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Generation(Frozen):
    """What a generation gave. Times are the target's clock, not this machine's: seconds.

    `tpot` is 0 where the artefact cannot decode: then one token is all there is.
    `finish` is ``eos``, ``length`` (max_new_tokens) or ``capacity`` (the KV cache is full).
    """

    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: str
    ttft: float
    tpot: float
    host_seconds: float


class Session:
    """A calbin on the simulator with its tokenizer.

    Args:
        calbin: the open artefact.
        mode: fast or strict.

    Raises:
        RuntimeFault: NO_TOKENIZER when text is asked for and the artefact has none.
    """

    def __init__(self, calbin: Calbin, mode: Mode = "fast") -> None:
        self.calbin = calbin
        self.spec = calbin.manifest.model
        self.device = Device(calbin, mode)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, from the artefact."""
        if self._tokenizer is None:
            if self.spec.tokenizer.kind == "none":
                raise RuntimeFault(
                    Problem(
                        "NO_TOKENIZER",
                        str(self.calbin.path),
                        "the artefact has no tokenizer",
                        hint="give token ids, or compile a model directory with tokenizer.json",
                    )
                )
            self._tokenizer = Tokenizer.from_str(self.calbin.file("tokenizer.json").decode("utf-8"))
        return self._tokenizer

    def prompt_ids(self, prompt: str | Sequence[Message], *, chat: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: text, or messages with role and content.
            chat: render through the model's chat template, where it has one.

        Raises:
            RuntimeFault: PROMPT_EMPTY; CHAT_TEMPLATE when the template refuses the messages.
        """
        template = self.spec.tokenizer.chat_template
        if not isinstance(prompt, str) or (chat and template is not None):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
            if not messages or (isinstance(prompt, str) and not prompt):
                raise _empty()
            return self.tokenizer.encode(self._render(messages), add_special_tokens=False).ids
        if not prompt:
            raise _empty()
        return self.tokenizer.encode(prompt, add_special_tokens=True).ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        template = self.spec.tokenizer.chat_template
        if template is None:
            raise RuntimeFault(
                Problem("NO_CHAT_TEMPLATE", self.spec.name, "the model has no chat template", hint="give plain text")
            )

        def refuse(message: str) -> None:
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.now(tz=UTC).astimezone().strftime(form)
        names = {t: self._token(t) for t in ("bos", "eos", "pad", "unk")}
        try:
            return env.from_string(template).render(
                messages=messages, add_generation_prompt=True, **{f"{k}_token": v for k, v in names.items()}
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise RuntimeFault(
                Problem("CHAT_TEMPLATE", self.spec.name, "the chat template refuses the messages", got=str(e))
            ) from e

    def _token(self, role: str) -> str:
        """A special token's text: the tokenizer's own, else that of the model's id."""
        if any(f.name == "tokenizer_config.json" for f in self.calbin.manifest.files):
            own = json.loads(self.calbin.file("tokenizer_config.json")).get(f"{role}_token")
            text = own.get("content") if isinstance(own, dict) else own
            if isinstance(text, str):
                return text
        ids = self.spec.tokens.eos if role == "eos" else (getattr(self.spec.tokens, role),)
        return "" if not ids or ids[0] is None else (self.tokenizer.id_to_token(ids[0]) or "")

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        chat: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Generate until an end-of-sequence token, `max_new_tokens`, or the cache is full.

        Args:
            prompt: text, messages or token ids.
            max_new_tokens: at most this many.
            sampling: greedy if None.
            chat: see `prompt_ids`.
            on_text: called with each new piece of text as it is final.

        Raises:
            RuntimeFault: an empty prompt, ids out of range; NO_SUCH_SUBMODEL when more than one token is asked of an
                artefact without decode.
            CapacityError: PROMPT_TOO_LONG before anything runs.
            UsageError: SAMPLING_RANGE.
        """
        ids = [int(t) for t in prompt] if _are_ids(prompt) else self.prompt_ids(prompt, chat=chat)  # type: ignore[arg-type]
        start = time.perf_counter()
        steps = self.device.plan_prefill(ids, 0, 0)
        decode = self.device.decode_submodel(1) if max_new_tokens > 1 or self.device.decode_batches else None
        hz = self.device.target.rates.clock.value
        call = self.device.target.costs.call.value / hz
        ttft = sum(self.device.time(s.submodel, [len(t) for t in s.tokens], s.past).cycles / hz + call for s in steps)
        sampling = sampling or Sampling()
        _check_sampling(sampling)
        choose = _chooser(sampling)
        out: list[int] = []
        text = ""
        finish = "length"
        for token in self._tokens(ids, choose) if max_new_tokens > 0 else ():
            if token in self.spec.tokens.eos:
                finish = "eos"
                break
            out.append(token)
            if self.spec.tokenizer.kind != "none":
                now = self.tokenizer.decode(out, skip_special_tokens=True)
                # a token may end inside a UTF-8 character; wait for its rest
                if not now.endswith("�") and on_text is not None and len(now) > len(text):
                    on_text(now[len(text) :])
                    text = now
            if len(out) >= max_new_tokens:
                break
            if len(ids) + len(out) > self.calbin.manifest.states.capacity:
                # the last token needs a row of its own to be followed by another one
                finish = "capacity"
                break
        final = self.tokenizer.decode(out, skip_special_tokens=True) if self.spec.tokenizer.kind != "none" else ""
        if on_text is not None and len(final) > len(text):
            on_text(final[len(text) :])
        middle = min(len(ids) + len(out) // 2, self.calbin.manifest.states.capacity - 1)
        tpot = self.device.time(decode.name, [1], [middle]).cycles / hz + call if decode is not None else 0.0
        return Generation(
            text=final,
            prompt_tokens=len(ids),
            tokens=tuple(out),
            finish=finish,
            ttft=ttft,
            tpot=tpot,
            host_seconds=time.perf_counter() - start,
        )

    def _tokens(self, ids: Sequence[int], choose: Callable[[NDArray[np.float32]], int]) -> Iterator[int]:
        logits = self.device.prefill(ids)
        past = len(ids)
        while True:
            token = choose(logits)
            yield token
            logits = self.device.decode([token], [past], [0])[0]
            past += 1


def _are_ids(prompt: object) -> bool:
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return (
        not isinstance(prompt, str)
        and isinstance(prompt, Sequence)
        and all(isinstance(t, int | np.integer) for t in prompt)
    )


def _empty() -> RuntimeFault:
    return RuntimeFault(
        Problem("PROMPT_EMPTY", "prompt", "the prompt has no tokens", "at least one", hint="give some text")
    )


def _check_sampling(s: Sampling) -> None:
    problems = Problems()
    for name, ok, expected in (
        ("temperature", np.isfinite(s.temperature) and s.temperature >= 0, "a finite number, 0 or more"),
        ("top_k", s.top_k >= 0, "0 (off) or more"),
        ("top_p", 0 < s.top_p <= 1, "above 0, at most 1"),
        ("seed", s.seed >= 0, "0 or more"),
    ):
        if not ok:
            problems.add(
                "SAMPLING_RANGE", name, "not a usable sampling parameter", expected=expected, got=getattr(s, name)
            )
    problems.raise_if_any(UsageError)


def _chooser(s: Sampling) -> Callable[[NDArray[np.float32]], int]:
    if s.temperature <= 0:
        return lambda logits: int(np.argmax(logits))
    rng = np.random.default_rng(s.seed)

    def draw(logits: NDArray[np.float32]) -> int:
        with np.errstate(over="ignore"):  # at a temperature near 0 all but the largest go to -inf
            z = (logits.astype(np.float64) - logits.max()) / s.temperature
        order = np.argsort(-z, kind="stable")
        if s.top_k:
            order = order[: s.top_k]
        p = np.exp(z[order] - z[order[0]])
        p /= p.sum()
        keep = max(1, int(np.searchsorted(np.cumsum(p), s.top_p) + 1))
        p = p[:keep] / p[:keep].sum()
        return int(order[rng.choice(len(p), p=p)])

    return draw

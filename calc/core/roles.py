"""What a sub-model is for: its role says which tensors and registers a host must serve, and what a batch means.

Everything that names an input, an output, a CSR or a state reads it here: trace, graphs from files, place, manifest,
checks, runtime, replay and docs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RoleName = Literal["prefill", "decode", "encode"]
ModelType = Literal["llm_prefill", "llm_decode", "encoder"]

IDS, PAST, CURRENT, SLOT = "input_ids", "past_kv_cur_seq_len", "cur_seq_len", "kv_slot"
LOGITS, EMBEDDING = "logits", "embedding"

CSRS = {
    PAST: "valid tokens in the slot before the call, 0..max_seq_len - cur_seq_len",
    CURRENT: "valid tokens in the call, 1..bucket; 0 for an idle sequence of a batch",
    SLOT: "the state slot of the sequence, 0..slots - 1",
}
"""The CSR arrays and the bounds of their elements, in the order of the instruction set; one element per sequence."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of a role.

    Attributes:
        name: semantic name.
        dtype: element type in memory.
        per: one element (input) or row (output) per token of the bucket, or per sequence.
        width: what the last axis of an output is as wide as; None for an input of one element per token.
        valid: the CSR that bounds the token axis.
    """

    name: str
    dtype: Literal["i32", "f32"]
    per: Literal["token", "sequence"]
    width: Literal["vocab", "hidden"] | None = None
    valid: str | None = None

    def shape(self, batch: int, seq: int, widths: dict[str, int]) -> tuple[int, ...]:
        """Dimensions for a static shape of the model."""
        lead = (batch, seq) if self.per == "token" else (batch,)
        return lead if self.width is None else (*lead, widths[self.width])


@dataclass(frozen=True)
class Role:
    """One role.

    Attributes:
        name: see `RoleName`.
        model_type: what the manifest calls it beside the role (R1).
        inputs, outputs: what the host writes and reads.
        csrs: the registers it sets before a call.
        several: whether a call takes several tokens of a sequence: a bucket.
        stateful: whether it reads and writes states.
        batch: what a batch is, in words, and the largest one.
    """

    name: RoleName
    model_type: ModelType
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    csrs: tuple[str, ...]
    several: bool
    stateful: bool
    batch: str
    max_batch: int


_TOKENS = Tensor(IDS, "i32", "token", valid=CURRENT)

ROLES: dict[str, Role] = {
    r.name: r
    for r in (
        Role(
            "prefill",
            "llm_prefill",
            (_TOKENS,),
            (Tensor(LOGITS, "f32", "sequence", "vocab"),),
            (PAST, CURRENT, SLOT),
            several=True,
            stateful=True,
            batch="one sequence",
            max_batch=1,
        ),
        Role(
            "decode",
            "llm_decode",
            (_TOKENS,),
            (Tensor(LOGITS, "f32", "sequence", "vocab"),),
            (PAST, CURRENT, SLOT),
            several=False,
            stateful=True,
            batch="independent sequences, each with a slot of its own",
            max_batch=64,
        ),
        Role(
            "encode",
            "encoder",
            (_TOKENS,),
            (Tensor(EMBEDDING, "f32", "sequence", "hidden"),),
            (CURRENT,),
            several=True,
            stateful=False,
            batch="one sequence",
            max_batch=1,
        ),
    )
}
"""Every role by name; a language model needs prefill or decode, an embedder encode."""

if tuple(ROLES) != get_args(RoleName):
    raise ValueError("the roles and their names differ")


# -- names of states --------------------------------------------------------------------------------------------------

BEFORE = "past_"
"""Prefix of the graph input that stands for a state; the output has the state's own name."""

WHICH = ("key", "value")


def kv_name(layer: int, which: str) -> str:
    """Name of a layer's key or value state."""
    return f"kv.{layer}.{which}"


def state_input(state: str) -> str:
    """The graph input for a state's contents before the call."""
    return BEFORE + state


def is_state_input(name: str | None) -> bool:
    """Whether a graph's input stands for a state."""
    return name is not None and name.startswith(BEFORE) and name not in CSRS


def is_state(name: str | None) -> bool:
    """Whether a graph's output stands for a state: all do that are not an output of a role."""
    return name is not None and not any(name == t.name for r in ROLES.values() for t in r.outputs)


def state_of(value: str) -> str:
    """The state behind a graph input."""
    return value.removeprefix(BEFORE)


def is_kv(name: str) -> bool:
    """Whether a state's name is that of a layer's keys or values."""
    return name.startswith("kv.") and name.rpartition(".")[2] in WHICH


def layer_of(value: str) -> int:
    """The layer in a state's name, or in that of its input."""
    return int(value.split(".")[1])

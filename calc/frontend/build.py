"""A model from its config with parameters that have a shape and no bytes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from calc.core.errors import InternalError


@dataclass(frozen=True)
class FakeModel:
    """A model whose parameters are fake, whose buffers (inverse frequencies, scales) are real.

    Attributes:
        model: in float32, in evaluation mode.
        mode: the fake mode that its parameters belong to.
    """

    model: PreTrainedModel
    mode: FakeTensorMode


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `config` with its parameters on the meta device and its buffers real."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)  # from_config writes into it
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.eval()
    return model


def fake_model(config: PreTrainedConfig) -> FakeModel:
    """The model of `config` with fake float32 parameters, tied as the config says."""
    model = empty_model(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with mode:
                    fake = torch.empty(parameter.shape, dtype=torch.float32)
                    module._parameters[name] = nn.Parameter(fake, requires_grad=False)
    model.tie_weights()
    unreal = [n for n, b in model.named_buffers() if b.device.type == "meta"]
    if unreal:
        raise InternalError(f"buffers without data: {unreal}")
    return FakeModel(model, mode)

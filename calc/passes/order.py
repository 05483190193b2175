"""The graph passes in their order: order is meaning, so it stands in one place."""

from __future__ import annotations

from calc.passes.base import Pass
from calc.passes.fuse.activate import FuseActivate
from calc.passes.fuse.add import FuseAdd
from calc.passes.fuse.attention_kv import FuseAttentionKv
from calc.passes.fuse.bias import FuseBias
from calc.passes.fuse.embed import FuseEmbed
from calc.passes.fuse.glu import FuseGlu
from calc.passes.fuse.join_linears import JoinLinears
from calc.passes.fuse.last_row import FuseLastRow
from calc.passes.fuse.layer_norm import FuseLayerNorm
from calc.passes.fuse.linear import FuseLinear
from calc.passes.fuse.lm_head import FuseLmHead
from calc.passes.fuse.moe import FuseMoe
from calc.passes.fuse.qk_norm_rope import FuseQkNormRope
from calc.passes.fuse.residual import FuseResidual
from calc.passes.fuse.rms_norm import FuseRmsNorm
from calc.passes.normalise import Normalise


def fusion_passes() -> tuple[Pass, ...]:
    """From the exported graph to calc ops."""
    return (
        Normalise(),
        FuseLinear(),
        FuseQkNormRope(),
        FuseAttentionKv(),
        FuseGlu(),
        FuseMoe(),
        FuseLastRow(),
        FuseLmHead(),
        JoinLinears(),
        FuseRmsNorm(),
        FuseLayerNorm(),
        FuseResidual(),
        FuseEmbed(),
        FuseActivate(),
        FuseBias(),
        FuseAdd(),
    )

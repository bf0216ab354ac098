"""How do I describe a model?

A model is an ordinary ``nn.Module`` of one device and a layout that says where its blocks are and how each parameter may be
divided::

    ModelLayout(blocks="layers", num_blocks=args.n_layers, embedding=("embed",), head=("norm", "out"), dim=args.dim,
                rules={"layers.*.wq.weight": Column(), "layers.*.wo.weight": Row()},
                mixers={"layers.*.attention": causal_attention(args.n_heads)}, ...)

* ``Model``: a family: flavors, ``define``, weight formats
* ``ModelDefinition``: layout, ``build``, parameters and FLOPs of one size
* ``ModelLayout``: where the blocks are; rules, mixers, initial values
* ``Column``: divided over its outputs
* ``Row``: divided over its inputs
* ``Shard``: divided in another dimension
* ``Replicate``: the same on all ranks
* ``Experts``: stacked over experts
* ``Rule``: any of these
* ``Mixer``: a module that mixes positions
* ``causal_attention``: the usual mixer
* ``CAUSAL_ATTENTION``: its kind
* ``InitialValue``: any of the following
* ``Constant``: the same value everywhere
* ``Normal``: a normal distribution
* ``TruncatedNormal``: a normal distribution within limits
* ``Uniform``: a uniform distribution
* ``SequenceShare``: a rank's positions, for a mixer that divides itself
* ``CausalAttention``: attention that knows documents and decoding
* ``Decoding``: the keys and values of earlier positions, for generation
* ``current_decoding``: that of the model that runs, if any
* ``Dropout``: dropout that no mesh changes
* ``RandomStream``: base class of modules with random draws that no mesh changes
* ``add_auxiliary_loss``: a loss from inside the model
* ``matches``: whether a name matches patterns
* ``WeightFormat``: names of the weights in other formats
* ``ForeignTensor``: a tensor in such a format
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.model.attention import CausalAttention as CausalAttention
    from titan_core.api.model.auxiliary_loss import add_auxiliary_loss as add_auxiliary_loss
    from titan_core.api.model.components import Model as Model
    from titan_core.api.model.decoding import Decoding as Decoding, current_decoding as current_decoding
    from titan_core.api.model.dropout import Dropout as Dropout
    from titan_core.api.model.initial_values import (
        Constant as Constant,
        InitialValue as InitialValue,
        Normal as Normal,
        TruncatedNormal as TruncatedNormal,
        Uniform as Uniform,
    )
    from titan_core.api.model.layout import ModelDefinition as ModelDefinition, ModelLayout as ModelLayout
    from titan_core.api.model.layout_rules import (
        CAUSAL_ATTENTION as CAUSAL_ATTENTION,
        Column as Column,
        Experts as Experts,
        Mixer as Mixer,
        Replicate as Replicate,
        Row as Row,
        Rule as Rule,
        Shard as Shard,
        causal_attention as causal_attention,
    )
    from titan_core.api.model.patterns import matches as matches
    from titan_core.api.model.random_streams import RandomStream as RandomStream
    from titan_core.api.model.sequence_share import SequenceShare as SequenceShare
    from titan_core.api.model.weights import ForeignTensor as ForeignTensor, WeightFormat as WeightFormat
else:
    __getattr__ = getter(__name__, "model")
    __all__ = names_of("model")

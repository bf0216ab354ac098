"""How do I describe a model?

A model is an ordinary ``nn.Module`` of one device and a layout that says where its blocks are and how each parameter may be
divided::

    ModelLayout(blocks="layers", num_blocks=args.n_layers, embedding=("embed",), head=("norm", "out"), dim=args.dim,
                rules={"layers.*.wq.weight": Column(), "layers.*.wo.weight": Row()},
                mixers={"layers.*.attention": causal_attention(args.n_heads)}, ...)

* ``Model``: a model family (hook ``titan_models``): flavors, ``define``, weight formats
* ``ModelDefinition``: layout, ``build``, parameters and FLOPs of one size
* ``ModelLayout``: where the blocks are; rules, mixers, initial values
* ``Column``: rule: a linear layer divided over its outputs
* ``Row``: rule: a linear layer divided over its inputs
* ``Shard``: rule: a parameter of any module, divided along a dimension
* ``Replicate``: rule: the whole parameter on all ranks
* ``Experts``: rule: the weights of one expert at each index of a dimension
* ``Router``: how many experts a module chooses from, and for each token
* ``Rule``: any of these five
* ``Mixer``: a module that mixes positions: its kind, its heads, its rule for context parallelism
* ``causal_attention``: returns the mixer of causal softmax attention
* ``CAUSAL_ATTENTION``: the kind of that mixer
* ``InitialValue``: how a parameter is initialised: any of the following six
* ``Constant``: the same value everywhere
* ``Normal``: a normal distribution
* ``TruncatedNormal``: a normal distribution within limits
* ``Uniform``: a uniform distribution
* ``Computed``: what a function of the plugin computes for each element
* ``Loaded``: no value, for a parameter that only files have
* ``Elements``: what such a function receives: indices, random numbers
* ``SequenceShare``: the positions that a rank has, for a mixer's own rule
* ``CausalAttention``: a module that computes such a mixer, also within documents and for generation
* ``Decoding``: what a mixer keeps of earlier positions, for generation; needed by each mixer with a state
* ``current_decoding``: returns the ``Decoding`` of the running forward pass, if it generates
* ``Dropout``: dropout with the same masks on every mesh
* ``RandomStream``: base class of modules whose random draws are the same on every mesh
* ``add_auxiliary_loss``: adds a loss from inside the model, such as that of load balancing
* ``add_statistic``: counts something inside the model, exactly, over the global batch of a step
* ``matches``: whether the name of a parameter or module matches patterns
* ``WeightFormat``: the names and shapes that a family's weights have in another format
* ``ForeignTensor``: the name and layout of a parameter in such a format
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
        Computed as Computed,
        Constant as Constant,
        Elements as Elements,
        InitialValue as InitialValue,
        Loaded as Loaded,
        Normal as Normal,
        TruncatedNormal as TruncatedNormal,
        Uniform as Uniform,
    )
    from titan_core.api.model.layout import (
        ModelDefinition as ModelDefinition,
        ModelLayout as ModelLayout,
        matches as matches,
    )
    from titan_core.api.model.layout_rules import (
        CAUSAL_ATTENTION as CAUSAL_ATTENTION,
        Column as Column,
        Experts as Experts,
        Mixer as Mixer,
        Replicate as Replicate,
        Router as Router,
        Row as Row,
        Rule as Rule,
        Shard as Shard,
        causal_attention as causal_attention,
    )
    from titan_core.api.model.random_streams import RandomStream as RandomStream
    from titan_core.api.model.sequence_share import SequenceShare as SequenceShare
    from titan_core.api.model.statistic import add_statistic as add_statistic
    from titan_core.api.model.weights import ForeignTensor as ForeignTensor, WeightFormat as WeightFormat
else:
    __getattr__ = getter(__name__, "model")
    __all__ = names_of("model")

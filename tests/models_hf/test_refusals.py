"""What Titan does not understand of a model of the library is refused with the reason, before anything is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness import small_gpt
from harness.hf_families import config_of
from titan_core.api import UserError
from titan_core.model.dependences import check_draws_and_order
from titan_core.model.trial import SmallModelTrial
from titan_models_hf import transformers_private as library
from titan_models_hf.cache import facts_of
from titan_models_hf.config import HFArgs
from titan_models_hf.derive import derive
from titan_models_hf.layout import define
from titan_models_hf.reference import check_model
from titan_models_hf.trace import Mask


def args(family: str, **more: Any) -> HFArgs:
    architecture, config = config_of(family, **more)
    return HFArgs(architecture=architecture, config=config)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [4.0] * 8, "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 40,
}  # fmt: skip
SMALL = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
ZAMBA = {
    **SMALL, "num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 16, "n_mamba_heads": 8, "num_mem_blocks": 1,
}  # fmt: skip
OPT = {
    "vocab_size": 288, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": 64, "max_position_embeddings": 256, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
REFUSED: dict[str, tuple[HFArgs, str]] = {
    "name": (HFArgs(architecture="qwen33"), "did you mean 'qwen3'"),
    "key": (args("llama", hiden_size=32), "has no such key; did you mean 'hidden_size'"),
    "two names": (
        args("mixtral", num_experts=4, num_local_experts=8),
        "num_local_experts, another name of the same key, is 8",
    ),
    "value": (args("llama", num_attention_heads=5), "transformers rejects it"),
    "dropout": (args("llama", attention_dropout=0.1), "set attention_dropout = 0.0 in model.args.config"),
    "dropout module": (args("phi3", resid_pdrop=0.1, embd_pdrop=0.0), "set resid_pdrop = 0.0 in model.args.config"),
    "functional dropout": (
        HFArgs(architecture="starcoder2", config={**SMALL, "residual_dropout": 0.2, "embedding_dropout": 0.1}),
        "residual_dropout = 0.2 and embedding_dropout = 0.1 let it draw random numbers in training",
    ),
    "dropout by default": (
        HFArgs(architecture="seed_oss", config=SMALL),
        "set attention_dropout = 0.0, residual_dropout = 0.0 in model.args.config",
    ),
    "layer drop": (
        HFArgs(architecture="opt", config={**OPT, "layerdrop": 0.1}),
        "layerdrop = 0.1 let it draw random numbers in training, which would depend on the mesh: in 'model.decoder' (rand)",
    ),
    "jitter": (args("mixtral", router_jitter_noise=1e-6), "set router_jitter_noise = 0.0 in model.args.config"),
    "jitter by default": (
        HFArgs(architecture="phimoe", config={**SMALL, "sliding_window": None, "num_local_experts": 4}),
        "set router_jitter_noise = 0.0 in model.args.config",
    ),
    "a block of a kind that its list of layers lacks": (
        HFArgs(architecture="zamba2", config={**ZAMBA, "layer_types": ["mamba", "hybrid"] * 2}),
        "forward fails in module 'model.layers.1.shared_transformer.feed_forward' (KeyError: 1) when it is called",
    ),
    "blocks that share a module": (
        HFArgs(architecture="zamba2", config={**ZAMBA, "layers_block_type": ["mamba", "hybrid"] * 2}),
        "'model.layers.3.shared_transformer.feed_forward.gate_up_proj.weight' is a parameter of several blocks",
    ),
    "dynamic": (
        args("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "chooses its frequencies by the longest position",
    ),
    "longrope": (args("phi3", rope_parameters=LONGROPE), "chooses its frequencies by the longest position"),
    "routers": (args("mixtral", output_router_logits=True), "adds a loss of the routers"),
    "window in the mask": (HFArgs(architecture="phimoe", config={"sliding_window": 16}), "is not causal"),
    "no blocks": (HFArgs(architecture="cpmant"), "needs one list of blocks"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    refused, why = REFUSED[case]
    with pytest.raises(UserError) as raised:
        derive(refused)
    assert why in str(raised.value)


def test_a_mask_that_differs_from_the_keyword_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager implementation adds the mask, kernels and Titan read the keyword: a model whose two disagree has no one
    meaning."""
    from transformers.models.mistral import modeling_mistral

    original = modeling_mistral.eager_attention_forward
    assert original is not None
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)
    with pytest.raises(UserError, match="is not a causal window of 16 positions"):
        derive(args("mistral"))


def test_an_unknown_keyword_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_models_hf import mixers

    monkeypatch.setattr(mixers, "KNOWN", mixers.KNOWN - {"sliding_window"})
    with pytest.raises(UserError, match="is called with sliding_window, which Titan does not know"):
        derive(args("mistral"))


@pytest.mark.parametrize("window", [None, 1, 16, 4096])
def test_masks_are_read_at_their_boundaries(window: int | None) -> None:
    def shifted(by: int) -> Any:
        reach = window or 1 << 30
        return lambda batch, head, query, key: (key <= query + (by == 2)) & (query - key < reach + (by if by < 2 else 0))

    assert Mask(shifted(0)).is_causal(window)
    assert not Mask(shifted(2)).is_causal(window)
    if window is not None:
        assert not Mask(shifted(1)).is_causal(window)
        assert not Mask(shifted(-1)).is_causal(window)
        assert not Mask(None).is_causal(window)


def test_a_chunked_mask_is_not_a_window() -> None:
    chunked = Mask(lambda batch, head, query, key: (key <= query) & (query // 16 == key // 16))
    assert not chunked.is_causal(16)
    assert not chunked.is_causal(None)


def test_an_attention_that_differs_from_the_derived_one_raises() -> None:
    """A model could pass other keywords in training than in the trace."""
    from titan_models_hf.mixers import attend

    module = nn.Module()
    module.titan_call = (0.5, 16, None, False)  # type: ignore[assignment]
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(RuntimeError, match="differs from the one that Titan derived"):
        attend(module, q, q, q, None, sliding_window=8)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_is_refused_by_the_trial(is_decoder: bool) -> None:
    """GPT-J computes its attention itself, with the library's masks: nothing but its logits says whether it is causal."""
    config = {"n_layer": 2, "n_head": 4, "n_embd": 64, "rotary_dim": 8, "n_positions": 64, "vocab_size": 288}
    wanted = HFArgs(architecture="gptj", config={**config, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
    definition = define(wanted)
    assert facts_of(wanted).eager
    with torch.device("meta"):
        model: Any = definition.build()
    if not is_decoder:
        for module in model.modules():
            if hasattr(module, "_attn"):
                attend_causally = module._attn
                module._attn = lambda q, k, v, mask=None, attend=attend_causally: attend(q, k, v, None)
    trial = SmallModelTrial(model, definition.layout, "hf", torch.device("cpu"))
    problems = list(check_draws_and_order(trial, small_gpt.job_of(definition)))
    later = "module 'transformer.h.0.attn', before it calls 'transformer.h.0.attn.out_proj', depends on later tokens"
    assert [later in problem.why for problem in problems] == ([] if is_decoder else [True]), problems


def test_draws_without_effect_are_accepted() -> None:
    """PhiMoE without jitter draws among experts of which only the best is left."""
    config = {**SMALL, "sliding_window": None, "num_local_experts": 4, "router_jitter_noise": 0.0}
    definition = define(HFArgs(architecture="phimoe", config=config))
    with torch.device("meta"):
        model: Any = definition.build()
    trial = SmallModelTrial(model, definition.layout, "hf", torch.device("cpu"))
    assert trial.draws.operators
    assert not list(check_draws_and_order(trial, small_gpt.job_of(definition)))


@pytest.mark.parametrize("same", [True, False])
def test_experts_that_differ_from_the_eager_ones_are_refused_by_the_trial(same: bool) -> None:
    """A family's eager experts may compute what the library's experts functions, and Titan, do not."""
    definition = define(args("mixtral"))
    with torch.device("meta"):
        model: Any = definition.build()
    if not same:
        for layer in model.model.layers:
            layer.mlp.experts._apply_gate = lambda rows: rows.chunk(2, dim=-1)[0]
    trial = SmallModelTrial(model, definition.layout, "hf", torch.device("cpu"))
    problems = list(check_model(model, trial, None))  # type: ignore[arg-type]
    why = f"its logits are not those of transformers {library.VERSION} with its eager implementation"
    assert [problem.why for problem in problems] == ([] if same else [why])
    assert trial.same(trial.run(trial.tokens)), "the check has left something changed"


def test_every_architecture_of_the_table_is_one_of_the_library() -> None:
    assert {"llama", "qwen3", "gemma3_text", "gpt_oss"} <= set(library.architectures())

"""Tiny random models of the architectures that lenprobe reads, built offline."""

import torch
import transformers as hf

_BASE = {"vocab_size": 64}
_LLAMA = {
    **_BASE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    **_BASE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SCALINGS = {
    "llama3": _LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}

ARCHITECTURES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    **{
        f"llama-{name}": lambda scaling=scaling: hf.LlamaForCausalLM(
            hf.LlamaConfig(**_LLAMA, rope_parameters=dict(scaling))
        )
        for name, scaling in _SCALINGS.items()
    },
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2, **_BASE
        )
    ),
    "neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(
            rotary_pct=0.5, **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            **_BASE,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **_BASE)
    ),
    "mpt": lambda: hf.MptForCausalLM(
        hf.MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=128, **_BASE)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(head_dim=8, sliding_window=8, **_LLAMA)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(head_dim=8, sliding_window=8, **{**_LLAMA, "num_hidden_layers": 6})
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=8, **_LLAMA)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(no_rope_layers=[1, 0], **_LLAMA)),
    "phi": lambda: hf.PhiForCausalLM(
        hf.PhiConfig(**{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"})
    ),
}


def huggingface(name: str, seed: int = 0):
    """A tiny random Hugging Face model with eager attention, weights large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[name]().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "norm" not in parameter_name:
                    parameter.mul_(6.0)
    model.config._attn_implementation = "eager"
    return model


def bridge(name: str, seed: int = 0):
    """The same model behind a TransformerBridge."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = huggingface(name, seed)
    return build_bridge_from_module(
        model, architecture=type(model).__name__, hf_config=model.config, device="cpu"
    )


def native(positions: str, **arguments):
    """A native TransformerBridge with 2 layers of 2 heads."""
    import transformer_lens.model_bridge.sources.native  # noqa: F401  (adds boot_native on 4.x)
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_native(
        TransformerBridgeConfig(
            **{
                "n_layers": 2,
                "n_heads": 2,
                "d_model": 32,
                "d_head": 16,
                "d_vocab": 64,
                "n_ctx": 128,
                "attn_only": True,
                "normalization_type": None,
                "positional_embedding_type": positions,
                "seed": 0,
                "act_fn": "relu",
                **arguments,
            }
        )
    )


def tokens(batch: int = 3, length: int = 24, seed: int = 0, d_vocab: int = 64):
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, d_vocab, (batch, length), generator=generator)

"""Small models of Hugging Face families of 2025 and 2026: decoders, encoders, vision, audio, time series.

They have random weights. Language models are called without a cache, as in calibration and export.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn

from zoo.entry import Entry, Feeds, image, mask, tokens, vector

_TEXT = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
_DECODER = _TEXT | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False,
                    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
        "patch_size": 8}  # fmt: skip
_PICTURE, _LARGE = image(3, 32, 32), image(3, 64, 64)
_IDS: Feeds = {"input_ids": tokens(100, 12)}
_WORDS: Feeds = {"input_ids": tokens(100, 12), "attention_mask": mask(12)}

Row = tuple[str, str, dict[str, Any], Feeds]
# name: (family.model class, config class, settings other than the default, inputs)
MODELS: dict[str, Row] = {
    # Decoders
    "qwen3": ("qwen3.Qwen3ForCausalLM", "Qwen3Config", _DECODER, _WORDS),
    "qwen3_next": ("qwen3_next.Qwen3NextModel", "Qwen3NextConfig",
                   _DECODER | _EXPERTS | {"linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                          "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                          "shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 1],
                                          "layer_types": ["linear_attention", "full_attention"]}, _IDS),
    "qwen3_experts": ("qwen3_moe.Qwen3MoeModel", "Qwen3MoeConfig", _DECODER | _EXPERTS, _IDS),
    "gemma3": ("gemma3.Gemma3TextModel", "Gemma3TextConfig",
               _DECODER | {"sliding_window": 4, "query_pre_attn_scalar": 8,
                           "layer_types": ["sliding_attention", "full_attention"]}, _WORDS),
    "smollm3": ("smollm3.SmolLM3Model", "SmolLM3Config",
                _DECODER | {"no_rope_layers": [1, 0]}, _WORDS),
    "olmo3": ("olmo3.Olmo3Model", "Olmo3Config",
              _DECODER | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, _WORDS),
    "gpt_oss": ("gpt_oss.GptOssModel", "GptOssConfig",
                _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
                            "layer_types": ["sliding_attention", "full_attention"]}, _WORDS),
    "deepseek_v3": ("deepseek_v3.DeepseekV3Model", "DeepseekV3Config",
                    {k: v for k, v in _DECODER.items() if k != "head_dim"}
                    | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
                       "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
                       "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}, _IDS),
    "mamba2": ("mamba2.Mamba2Model", "Mamba2Config",
               {"vocab_size": 100, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8,
                "num_hidden_layers": 2, "n_groups": 2, "chunk_size": 4, "use_cache": False}, _IDS),
    "falcon_h1": ("falcon_h1.FalconH1Model", "FalconH1Config",
                  _DECODER | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
                              "mamba_chunk_size": 4}, _IDS),
    "lfm2": ("lfm2.Lfm2Model", "Lfm2Config",
             _DECODER | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, _IDS),
    "diffllama": ("diffllama.DiffLlamaModel", "DiffLlamaConfig", _DECODER, _WORDS),
    "bitnet": ("bitnet.BitNetModel", "BitNetConfig", _DECODER, _WORDS),
    # Text encoders
    "modernbert": ("modernbert.ModernBertForSequenceClassification", "ModernBertConfig",
                   _TEXT | {"local_attention": 8, "pad_token_id": 0, "max_position_embeddings": 64,
                            "layer_types": ["full_attention", "sliding_attention"]}, _WORDS),
    "eurobert": ("eurobert.EuroBertModel", "EuroBertConfig", _DECODER, _WORDS),
    "nomic_bert": ("nomic_bert.NomicBertModel", "NomicBertConfig", _TEXT | {"max_position_embeddings": 64}, _WORDS),
    # Vision
    "dinov3_convnext": ("dinov3_convnext.DINOv3ConvNextModel", "DINOv3ConvNextConfig",
                        {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}, _LARGE),
    "vjepa2": ("vjepa2.VJEPA2Model", "VJEPA2Config",
               {"patch_size": 8, "crop_size": 32, "frames_per_clip": 4, "tubelet_size": 2, "hidden_size": 48,
                "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 2.0, "pred_hidden_size": 48,
                "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}, vector(4, 3, 32, 32)),
    "hgnet_v2": ("hgnet_v2.HGNetV2ForImageClassification", "HGNetV2Config",
                 {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1],
                  "stem_channels": [3, 8, 16], "stage_in_channels": [16, 16, 32, 48],
                  "stage_mid_channels": [8, 16, 16, 24], "stage_out_channels": [16, 32, 48, 64],
                  "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2]}, _LARGE),
    "superpoint_encoder": ("superpoint.SuperPointEncoder", "SuperPointConfig",
                           {"encoder_hidden_sizes": [8, 8, 16, 16]}, image(1, 32, 32)),
    "pixio": ("pixio.PixioModel", "PixioConfig", _VIT, _PICTURE),
    # Audio
    "moonshine_encoder": ("moonshine.MoonshineEncoder", "MoonshineConfig",
                          {"hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
                           "encoder_num_attention_heads": 4, "max_position_embeddings": 64}, vector(2048)),
    "parakeet": ("parakeet.ParakeetForCTC", "ParakeetCTCConfig",
                 {"vocab_size": 20, "pad_token_id": 19,
                  "encoder_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                     "intermediate_size": 64, "subsampling_conv_channels": 8, "num_mel_bins": 16,
                                     "max_position_embeddings": 64}}, vector(64, 16)),
    "dac": ("dac.DacModel", "DacConfig",
            {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 2,
             "codebook_size": 16, "codebook_dim": 4}, vector(1, 256)),
    "mimi": ("mimi.MimiModel", "MimiConfig",
             {"hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16,
              "codebook_dim": 16, "num_quantizers": 3, "vector_quantization_hidden_dimension": 16,
              "upsample_groups": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 4, "sliding_window": 8, "frame_rate": 1500}, vector(1, 512)),
    # Time series
    "timesfm2_5": ("timesfm2_5.TimesFm2_5Model", "TimesFm2_5Config",
                   {"patch_length": 8, "context_length": 64, "horizon_length": 8, "num_hidden_layers": 2,
                    "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4,
                    "num_key_value_heads": 4, "output_quantile_len": 16},
                   {"past_values": vector(64), "past_values_padding": lambda count, _: torch.zeros(count, 64)}),
    "patchtst": ("patchtst.PatchTSTForPrediction", "PatchTSTConfig",
                 {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16,
                  "num_hidden_layers": 2, "ffn_dim": 32, "prediction_length": 4, "do_mask_input": False},
                 vector(32, 3)),
    "patchtsmixer": ("patchtsmixer.PatchTSMixerForPrediction", "PatchTSMixerConfig",
                     {"context_length": 32, "num_input_channels": 3, "d_model": 8, "num_layers": 2,
                      "mode": "mix_channel", "prediction_length": 4}, vector(32, 3)),
}  # fmt: skip


def _entry(name: str, model: str, config: str, smaller: dict[str, Any], feeds: Feeds) -> Entry:
    family, _, kind = model.partition(".")

    def build() -> nn.Module:
        home = import_module(f"transformers.models.{family}.modeling_{family}")
        found: nn.Module = getattr(home, kind)(getattr(transformers, config)(**smaller))
        return found

    return Entry(f"hf/{name}", build, feeds, about=kind)


ENTRIES = [_entry(name, *row) for name, row in MODELS.items()]

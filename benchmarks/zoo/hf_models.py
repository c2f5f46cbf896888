"""Small Hugging Face models with random weights: vision, text, speech, multimodal.

Vision models have an image classification head where there is one, as with `model.name=hf/NAME`; the others are
nn.Modules as a user of the Python API passes them.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from zoo.entry import Entry, Feeds, image, mask, tokens, vector

_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
}
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 100, "max_position_embeddings": 32}  # fmt: skip
_PATCHES = _VIT | {"patch_size": 8}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_PICTURE, _LARGE = image(3, 32, 32), image(3, 64, 64)
_WORDS: Feeds = {"input_ids": tokens(100, 12), "attention_mask": mask(12)}

Row = tuple[str, str, dict[str, Any], Feeds]
# name: (model class, config class, settings other than the default, inputs)
MODELS: dict[str, Row] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _PATCHES, _PICTURE),
    "vit_eager": ("ViTForImageClassification", "ViTConfig", _VIT | {"patch_size": 8, "attn_implementation": "eager"},
                  _PICTURE),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _PATCHES, _PICTURE),
    "deit_distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", _PATCHES, _PICTURE),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _PATCHES, _PICTURE),
    "dinov2_registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
                         _PATCHES, _PICTURE),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", _PATCHES, _PICTURE),
    "beit": ("BeitForImageClassification", "BeitConfig", _PATCHES, _PICTURE),
    "swin": ("SwinForImageClassification", "SwinConfig",
             _SWIN,
             _PICTURE),
    "swin_padded": ("SwinForImageClassification", "SwinConfig",
                    {"image_size": 40, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                     "window_size": 7}, image(3, 40, 40)),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config",
               _SWIN,
               _PICTURE),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}, _LARGE),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config",
                   {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}, _LARGE),
    "segformer": ("SegformerForImageClassification", "SegformerConfig",
                  {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64], "num_attention_heads": [1, 2, 5, 8]},
                  _LARGE),
    "segformer_segmentation": ("SegformerForSemanticSegmentation", "SegformerConfig",
                               {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64], "decoder_hidden_size": 32,
                                "num_attention_heads": [1, 2, 5, 8]}, _LARGE),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig",
                  {"image_size": 64, "hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]},
                  _LARGE),
    "mobilevitv2": ("MobileViTV2ForImageClassification", "MobileViTV2Config",
                    {"image_size": 64, "width_multiplier": 0.25}, _LARGE),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}, _LARGE),
    "regnet": ("RegNetForImageClassification", "RegNetConfig",
               {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "groups_width": 8},
               _LARGE),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", "MobileNetV1Config", {"depth_multiplier": 0.25}, _LARGE),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.35}, _LARGE),
    "efficientnet": ("EfficientNetForImageClassification", "EfficientNetConfig",
                     {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
                     _LARGE),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig",
                   {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48]}, _LARGE),
    "pvt": ("PvtForImageClassification", "PvtConfig",
            {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64]}, _LARGE),
    "cvt": ("CvtForImageClassification", "CvtConfig",
            {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}, _LARGE),
    "levit": ("LevitForImageClassification", "LevitConfig",
              {"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1]},
              _LARGE),
    "focalnet": ("FocalNetForImageClassification", "FocalNetConfig",
                 {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128]},
                 _LARGE),
    "hiera": ("HieraForImageClassification", "HieraConfig",
              {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]},
              _LARGE),
    "vit_msn": ("ViTMSNForImageClassification", "ViTMSNConfig", _PATCHES, _PICTURE),
    "clip_vision": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", _VIT | {"patch_size": 8, "projection_dim": 16},
                    _PICTURE),
    "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", _PATCHES, _PICTURE),
    "clip_text": ("CLIPTextModelWithProjection", "CLIPTextConfig", _BERT | {"projection_dim": 16, "eos_token_id": 2},
                  _WORDS),
    "bert": ("BertForSequenceClassification", "BertConfig", _BERT, _WORDS),
    "bert_eager": ("BertModel", "BertConfig", _BERT | {"attn_implementation": "eager"}, _WORDS),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig",
                   {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 100,
                    "max_position_embeddings": 32}, _WORDS),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _BERT | {"max_position_embeddings": 40}, _WORDS),
    "electra": ("ElectraForTokenClassification", "ElectraConfig", _BERT | {"embedding_size": 16}, _WORDS),
    "gpt2": ("GPT2Model", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32,
                                         "use_cache": False}, _WORDS),
    "llama": ("LlamaModel", "LlamaConfig",
              {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 100, "use_cache": False}, _WORDS),
    "t5_encoder": ("T5EncoderModel", "T5Config",
                   {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}, _WORDS),
    "whisper_encoder": ("WhisperEncoder", "WhisperConfig",
                        {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
                         "num_mel_bins": 16, "max_source_positions": 30}, vector(16, 60)),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
                 {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                  "conv_dim": [32, 32, 32], "conv_stride": [5, 4, 4], "conv_kernel": [10, 8, 4],
                  "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
                  "mask_time_prob": 0.0, "classifier_proj_size": 16}, vector(1600)),
    "audio_spectrogram": ("ASTForAudioClassification", "ASTConfig",
                          {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                           "max_length": 64, "num_mel_bins": 32}, vector(64, 32)),
    "videomae": ("VideoMAEForVideoClassification", "VideoMAEConfig",
                 _VIT | {"patch_size": 8, "num_frames": 4}, vector(4, 3, 32, 32)),
    "dpt_depth": ("DPTForDepthEstimation", "DPTConfig",
                  _VIT | {"patch_size": 8, "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4,
                          "neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16,
                          "reassemble_factors": [4, 2, 1, 0.5]},
                  _PICTURE),
    "swin2sr": ("Swin2SRForImageSuperResolution", "Swin2SRConfig",
                                {"image_size": 16, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
                                 "window_size": 4,
                                 "upscale": 2}, image(3, 16, 16)),
}  # fmt: skip


def _entry(name: str, model: str, config: str, smaller: dict[str, Any], feeds: Feeds) -> Entry:
    def build() -> nn.Module:
        home = transformers.models.whisper.modeling_whisper if model == "WhisperEncoder" else transformers
        found: nn.Module = getattr(home, model)(getattr(transformers, config)(**smaller))
        return found

    return Entry(f"hf/{name}", build, feeds, about=model)


ENTRIES = [_entry(name, *row) for name, row in MODELS.items()]

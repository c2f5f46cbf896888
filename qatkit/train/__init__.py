"""Training: the Lightning module, quantization of a model in parts, fine-tuning and distillation."""

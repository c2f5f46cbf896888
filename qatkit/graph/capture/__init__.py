"""Captures an nn.Module as a torch.fx graph by running it and recording its calls."""

"""From an nn.Module to a torch.fx graph, by running it: what is called is recorded, what is computed is known."""

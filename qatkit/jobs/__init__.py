"""The jobs of the commands, one file per job or stage; `pipeline` holds the order of the stages of a training run."""

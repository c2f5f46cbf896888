"""The jobs of the commands, one file per job or stage; `pipeline` has the order of the stages of a training run."""

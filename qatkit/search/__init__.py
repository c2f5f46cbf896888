"""A search: many runs (trials) whose settings Optuna proposes, of one study that any number of workers share."""

"""A search: many runs (trials) whose settings Optuna proposes, in one study that any number of workers share."""

"""A run, one file a stage; `pipeline` holds their order."""

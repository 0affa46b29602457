"""Export, import and check of plans and runs for training engines, one folder per engine."""

"""HSTU ranking models: checkpoints in the names of several trainers to model folders of kind `rank`."""

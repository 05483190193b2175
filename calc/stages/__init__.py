"""What the pipeline's lines stand for, where a stage needs more than one of frontend, passes and simulator."""

"""Where state leaves live, and how a checkpoint is loaded."""

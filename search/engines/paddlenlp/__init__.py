"""PaddleNLP: strategy files and launch commands."""

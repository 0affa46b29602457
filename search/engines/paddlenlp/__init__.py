"""PaddleNLP: its strategy files and launch arguments."""

"""What is trained and how: the model, its plan, the launch and the job that is priced."""

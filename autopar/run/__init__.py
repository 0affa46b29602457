"""Model, plan, engine settings and job of a training run."""

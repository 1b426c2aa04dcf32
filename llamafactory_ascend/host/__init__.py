"""The only place that knows the inside of LLaMA-Factory, Transformers and Accelerate."""

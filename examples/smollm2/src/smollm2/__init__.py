"""SmolLM2-135M-Instruct on every polyattn backend."""

"""Around a run: who holds its output_dir, how torchrun is started and stopped, what a signal asks for."""

"""Pictures of runs: kept beside their rows, made with their model, written as PNG files."""

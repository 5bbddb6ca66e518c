"""What a training run spends its time on: recorded while it runs, and read afterwards."""

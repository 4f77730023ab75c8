"""memopt in other people's training loops. Each module needs its trainer installed."""

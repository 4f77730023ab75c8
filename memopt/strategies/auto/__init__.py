"""The auto strategy: runs several strategies and keeps the fastest valid plan."""

"""What a step costs: time and memory of its operators and of the unplanned step."""

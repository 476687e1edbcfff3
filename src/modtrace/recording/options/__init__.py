"""What users choose: captures, schedules, filters of paths, ranges of steps."""

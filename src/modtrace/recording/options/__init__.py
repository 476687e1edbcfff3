"""The options that users set: captures, schedules, filters of paths, ranges of steps."""

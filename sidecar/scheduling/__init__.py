"""The leader's side of time: when jobs are due, and that it gets proposed.

zones, cron, changes, schedules (due times) and misfires (what becomes of those that passed unserved) are pure: they
read no clock and hold nothing but caches, so the same specification, the same times and the same tzdata give the same
answer on every machine. scheduler brings them together with the clock and the log.
"""

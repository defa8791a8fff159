"""The leader's side of time: when jobs are due (zones, cron, schedules), and what becomes of due times that passed
unserved (misfires).

These modules are pure: they read no clock and hold nothing but caches, so the same specification, the same times and
the same tzdata give the same answer on every machine.
"""

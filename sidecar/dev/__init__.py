"""A cluster on one machine, for a person to watch and to break: three sidecars, three agents, links that can be cut.

``DevCluster`` (cluster.py) owns the processes; ``Observer`` asks them how they are; ``view`` and ``lines`` show it;
``jobs`` is what the API says of scheduled jobs and does to them; ``checker`` and ``job_checker`` say whether anything
was done twice, never or partially; ``control`` takes orders from a second terminal.
"""

"""What can go wrong with a development cluster for a reason its user can do something about."""


class DevError(Exception):
    """The message says what is wrong and what to do."""

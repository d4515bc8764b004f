"""The check by which a public function refuses an argument."""


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds; it names the argument, the rule and what came."""
    if not condition:
        raise ValueError(message)

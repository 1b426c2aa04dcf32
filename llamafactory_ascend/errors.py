"""The one exception of the plugin."""


class AscendError(Exception):
    """Something the user must know and can act on.

    Args:
        what: what happened and where (file, key, row, rank).
        hint: what to type or change next.
        link: the upstream bug or document, if there is one.
    """

    def __init__(self, what: str, hint: str = "", link: str = "") -> None:
        self.what, self.hint, self.link = what, hint, link
        super().__init__(
            "\n".join(part for part in (what, hint and f"  next: {hint}", link and f"  see: {link}") if part)
        )

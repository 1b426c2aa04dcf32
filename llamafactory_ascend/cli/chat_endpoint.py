"""An OpenAI-compatible /v1/chat/completions endpoint, asked with patience and the standard library alone."""

import email.utils
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from llamafactory_ascend.errors import AscendError

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before the second try, and before any later one
AGAIN = (408, 409, 425, 429)  # and everything from 500 on
LARGEST = 8 << 20  # bytes of an answer


class Unanswered(Exception):
    """A question that has no answer after all tries; the message says what the last one came to."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where questions go.

    Attributes:
        url: of the chat completions.
        key: sent as a bearer token, and shown nowhere.
        tries: of a question.
        stop: set where nobody waits for answers any more.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    tries: int = 6
    timeout: float = 120.0
    temperature: float = 0.7
    first_wait: float = FIRST_WAIT
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the answer.

        Raises:
            Unanswered: not after all tries; errors that no try can change are not tried again.
        """
        said = ""
        for place in range(self.tries):
            wait = min(self.first_wait * 2**place, LONGEST_WAIT) * random.uniform(0.75, 1.25)
            try:
                return self._once(messages)
            except urllib.error.HTTPError as error:
                said = f"HTTP {error.code}: {self._body(error)}"
                if error.code not in AGAIN and error.code < 500:
                    raise Unanswered(said) from None
                wait = max(wait, _asked_wait(error.headers.get("Retry-After")))
            except TimeoutError:
                said = f"no answer within {self.timeout:g} s"
            except (OSError, HTTPException) as error:
                cause = " ".join(str(getattr(error, "reason", error)).split())
                said = self._hidden(f"{type(error).__name__}: {cause}")
            except ValueError as error:
                said = f"not the answer of a chat endpoint: {self._hidden(str(error))}"
            if place + 1 < self.tries and self.stop.wait(wait):
                break
        raise Unanswered(said)

    def _once(self, messages: list[dict[str, str]]) -> str:
        body = {"model": self.model, "messages": messages, "temperature": self.temperature}
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        deadline = time.monotonic() + self.timeout
        try:
            with opener.open(request, timeout=self.timeout) as response:
                data = b""
                while chunk := response.read1(1 << 16):
                    data += chunk
                    if len(data) > LARGEST:
                        raise ValueError(f"more than {LARGEST >> 20} MiB")
                    if time.monotonic() > deadline:
                        raise TimeoutError
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError | socket.timeout):
                raise TimeoutError from None
            raise
        return _content(data)

    def _body(self, error: urllib.error.HTTPError) -> str:
        try:
            text = _beginning(error.read(2000))
        except (OSError, HTTPException):
            text = ""
        return self._hidden(text or str(error.reason))

    def _hidden(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def _content(data: bytes) -> str:
    """Return the text of a completion.

    Raises:
        ValueError: there is none; the message shows how the answer begins.
    """
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
        if isinstance(text, str):
            return text
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        pass
    raise ValueError(_beginning(data) or "it is empty")


def _beginning(data: bytes) -> str:
    return " ".join(data[:2000].decode("utf-8", "replace").split())[:200]


def _asked_wait(value: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or as a date."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def completions_url(given: str) -> str:
    """Return the URL of the chat completions of a server: its root, its /v1, or the URL itself.

    Raises:
        AscendError: it is no HTTP URL, or holds a name or a key.
    """
    parts = urllib.parse.urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AscendError("--endpoint is no http:// or https:// URL", "--endpoint http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise AscendError(
            "--endpoint holds a name, a password or a query", "a key comes from an environment variable"
        )
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path}/chat/completions" if path.endswith("/v1") else f"{path}/v1/chat/completions"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def usable_key(value: str, variable: str) -> str:
    """Return a key without the space around it.

    Raises:
        AscendError: it cannot stand in a header; the message does not show it.
    """
    key = value.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise AscendError(f"the environment variable {variable} holds no key: it has spaces or other signs")
    return key

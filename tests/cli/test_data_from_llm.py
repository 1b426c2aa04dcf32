"""``llamafactory-ascend data from-llm`` against a server on this machine that behaves as badly as they do."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from llamafactory_ascend.cli import app, chat_endpoint, journal, question_answers
from llamafactory_ascend.errors import AscendError
from tests.running import BIN

KEY = "sk-very-secret-0815"
TOPICS = [f"topic{number:02d}" for number in range(12)]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


class Server(ThreadingHTTPServer):
    """Answers with pairs about the topic of a passage; `faults`: topic -> what to do first, in this order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.headers: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        topic = next(one for one in TOPICS if one in body["messages"][-1]["content"])
        self.server.asked[topic] += 1
        self.server.headers.append(self.headers["Authorization"])
        self.server.bodies.append(body)
        time.sleep(self.server.delay)
        faults = self.server.faults.get(topic, [])
        fault = faults.pop(0) if faults else ""
        pairs = [{"question": f"What is {topic}, part {n}?", "answer": f"It is {topic}."} for n in (1, 2)]
        pairs.append({"question": "What is the same in all?", "answer": "This."})
        text = f"<think>{{}}</think>Sure:\n```json\n{json.dumps(pairs)}\n```"
        if fault in ("429", "500", "401"):
            self.reply(int(fault), f'{{"error": "you sent {self.headers["Authorization"]}"}}')
        elif fault == "302":
            self.send_response(302)
            self.send_header("Location", f"{self.server.url}/elsewhere")
            self.end_headers()
        elif fault == "timeout":
            time.sleep(2)
        elif fault == "broken":
            self.reply(200, '{"choices": [')
        elif fault == "cut":
            self.reply(200, answer(text[:60]))
        elif fault == "empty":
            self.reply(200, answer(json.dumps([{"question": " ", "answer": "a"}, {"question": "Why so?"}])))
        else:
            self.reply(200, answer(text))

    def reply(self, code: int, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        if code == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def answer(text: str) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(chat_endpoint, "LONGEST_WAIT", 0.02)
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for topic in TOPICS:
        (folder / f"{topic}.md").write_text(f"About {topic}: it is what it is.")
    return folder


def from_llm(docs: Path, out: Path, server: Server, *words: str) -> Result:
    command = ["data", "from-llm", str(docs), str(out), "--endpoint", server.url, "--model", "m", *words]
    return CliRunner().invoke(app, command)


def rows_of(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_pairs_are_written_whatever_the_server_does_first(docs: Path, tmp_path: Path, server: Server) -> None:
    server.faults = {
        "topic00": ["429", "429"],
        "topic01": ["500"],
        "topic02": ["timeout"],
        "topic03": ["broken"],
        "topic04": ["cut", "empty"],
    }
    data = tmp_path / "data"
    data.mkdir()
    out = data / "qa.jsonl"
    found = from_llm(docs, out, server, "--timeout", "0.5", "--dataset-dir", str(data))
    assert found.exit_code == 0, found.output
    rows = rows_of(out)
    questions = [row["instruction"] for row in rows]
    assert len(rows) == 2 * len(TOPICS) + 1 and len(set(questions)) == len(questions)  # the same one once
    assert questions[:2] == [
        "What is topic00, part 1?",
        "What is topic00, part 2?",
    ]  # in the documents' order
    assert rows[0] == {"instruction": questions[0], "input": "", "output": "It is topic00."}
    expected = {"topic00": 3, "topic01": 2, "topic02": 2, "topic03": 2, "topic04": 3}
    assert server.asked == Counter({topic: expected.get(topic, 1) for topic in TOPICS})
    assert set(server.headers) == {f"Bearer {KEY}"}
    body = server.bodies[0]
    assert body["model"] == "m" and "Write 3 question-answer pairs" in body["messages"][1]["content"]
    assert json.loads((data / "dataset_info.json").read_text()) == {"qa": {"file_name": "qa.jsonl"}}
    assert names(data) == ["dataset_info.json", "qa.jsonl"]
    everything = found.output + "".join(file.read_text() for file in data.iterdir())
    assert KEY not in everything
    checked = CliRunner().invoke(app, ["data", "check", "qa", "--dataset-dir", str(data)])
    assert checked.exit_code == 0, checked.output


def test_what_is_done_is_not_asked_again(docs: Path, tmp_path: Path, server: Server) -> None:
    """The endpoint goes down for some passages; then half a line is lost; then the rest is asked."""
    server.faults = {topic: ["401"] * 99 for topic in TOPICS[6:8]}
    out = tmp_path / "qa.jsonl"
    found = from_llm(docs, out, server, "--parallel", "1")
    assert found.exit_code == 2 and not out.exists()
    assert "2 of 12 passages have no answer, the last one: HTTP 401: " in found.output
    assert KEY not in found.output and "Bearer ***" in found.output
    assert "the same command asks for the rest" in found.output
    part = out.with_name("qa.jsonl.part")
    assert KEY not in part.read_text() and len(part.read_text().splitlines()) == 11
    part.write_bytes(part.read_bytes()[:-20])  # as a power cut leaves it
    asked = server.asked.copy()
    other = from_llm(docs, out, server, "--pairs", "5")
    assert other.exit_code == 2 and "was begun with pairs 3, now it is 5" in other.output
    assert server.asked == asked and part.exists()
    server.faults = {}
    found = from_llm(docs, out, server)
    assert found.exit_code == 0, found.output
    again = server.asked - asked
    assert again == Counter({"topic06": 1, "topic07": 1, "topic11": 1})
    assert len(rows_of(out)) == 25 and not part.exists()
    refused = from_llm(docs, out, server)
    assert refused.exit_code == 2 and "exists; nothing was written" in refused.output


def test_an_endpoint_that_is_down_is_left_alone(docs: Path, tmp_path: Path, server: Server) -> None:
    server.faults = {topic: ["500"] * 99 for topic in TOPICS}
    out = tmp_path / "qa.jsonl"
    found = from_llm(docs, out, server, "--tries", "2", "--parallel", "1")
    assert found.exit_code == 2 and "12 of 12 passages have no answer" in found.output
    assert sum(server.asked.values()) <= 2 * 5 and names(tmp_path) == ["docs"]
    server.faults = {topic: ["302"] for topic in TOPICS}
    found = from_llm(docs, out, server)
    assert found.exit_code == 2 and "HTTP 302" in found.output  # the key does not follow to another place


def test_passages_without_a_pair_are_counted(docs: Path, tmp_path: Path, server: Server) -> None:
    server.faults = {"topic05": ["empty"] * 99}
    out = tmp_path / "qa.jsonl"
    found = from_llm(docs, out, server)
    assert found.exit_code == 1 and "1 passages gave no valid pair" in found.output
    assert server.asked["topic05"] == 3 and len(rows_of(out)) == 23


def test_interrupted_it_goes_on_where_it_stopped(docs: Path, tmp_path: Path, server: Server) -> None:
    """Ctrl-C keeps what was answered and what is under way; nothing of it is asked again."""
    server.delay = 0.3
    out = tmp_path / "qa.jsonl"
    words = ["data", "from-llm", str(docs), str(out), "--endpoint", server.url, "--model", "m"]
    command = [str(BIN / "llamafactory-ascend"), *words, "--parallel", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while sum(server.asked.values()) < 4:
        assert process.poll() is None and not time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(30) == 130 and "the same command goes on where it stopped" in said, said
    assert "Traceback" not in said and KEY not in said and not out.exists()
    assert sum(server.asked.values()) < 12
    server.delay = 0.0
    assert from_llm(docs, out, server).exit_code == 0
    assert server.asked == Counter(TOPICS) and len(rows_of(out)) == 25


def test_what_is_done_survives_a_torn_line_and_belongs_to_one_process(tmp_path: Path) -> None:
    file, settings = tmp_path / "out.jsonl.part", {"model": "m", "pairs": 3}
    pairs = question_answers.Pairs([{"question": "Why so?", "answer": "Because."}], {})
    with journal.opened(file, settings, False) as done:
        done.add("a", pairs)
        refused = pytest.raises(AscendError, match="another process writes it")
        with refused, journal.opened(file, settings, False):
            pass
    with file.open("ab") as lines:
        lines.write(b'{"passage": "b", "pai')  # the power went
    with journal.opened(file, settings, False) as done:
        assert done.pairs == {"a": pairs}
        done.add("c", pairs)
    with journal.opened(file, settings, False) as done:
        assert done.pairs == {"a": pairs, "c": pairs}
        done.remove()
    assert names(tmp_path) == []


def test_what_is_no_answer_is_shown() -> None:
    for data in (
        b"<html>Log in</html>",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": null}}]}',
    ):
        with pytest.raises(ValueError) as refused:
            chat_endpoint._content(data)
        assert str(refused.value) == data.decode()
    with pytest.raises(ValueError, match="it is empty"):
        chat_endpoint._content(b"")
    with pytest.raises(ValueError):
        chat_endpoint._content(b"[" * 100_000)


def test_a_model_that_repeats_a_bracket_is_not_read_to_the_end() -> None:
    begun = time.process_time()
    assert question_answers.parse("[{" * 30_000).valid == []
    assert question_answers.parse(f"[{'9' * 5_000}]").valid == []
    assert time.process_time() - begun < 5, "one try for each bracket took 20 s"


def test_urls_and_keys() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"):
        assert chat_endpoint.completions_url(given) == "http://h:1/v1/chat/completions"
    for given in ("h:1", "file:///etc/passwd", "https://me:secret@h/v1", "http://h/v1?key=secret"):
        with pytest.raises(AscendError) as refused:
            chat_endpoint.completions_url(given)
        assert "secret" not in str(refused.value)
    assert chat_endpoint.usable_key(" abc\n", "X") == "abc"
    with pytest.raises(AscendError) as refused:
        chat_endpoint.usable_key("abc\ndef", "X")
    assert "abc" not in str(refused.value) and "environment variable X" in str(refused.value)
    assert KEY not in repr(chat_endpoint.Endpoint("u", "m", KEY))


@pytest.mark.parametrize(
    ("text", "valid", "reason"),
    [
        ('[{"question": "Why so?", "answer": "Because."}]', 1, ""),
        ('{"pairs": [{"question": "Why so?", "answer": "Because."}]}', 1, ""),
        ('{"question": "Why so?", "answer": "B"}\n{"question": "How so?", "answer": "B"}', 2, ""),
        ('See [1]: [{"question": "Why so?", "answer": "Because."}] {', 1, "no object"),
        ("I cannot do that.", 0, "no JSON with `question` and `answer`"),
        ('[{"question": "Why so?", "answer": ""}]', 0, "`answer` is empty"),
        ('[{"question": "Why so?", "answer": 3}]', 0, "`answer` is no text"),
        ('[{"question": "?", "answer": "a"}]', 0, "`question` is not of 4 to 2,000 characters"),
        ('[{"question": "Why so?", "answer": "' + "a" * 8001 + '"}]', 0, "`answer` is not of 1 to 8,000"),
        ('[{"question": "Why so?", "answer": "a\\u0000"}]', 0, "`answer` holds control codes"),
    ],
)
def test_only_valid_pairs_are_taken(text: str, valid: int, reason: str) -> None:
    found = question_answers.parse(text)
    assert len(found.valid) == valid
    assert any(one.startswith(reason) for one in found.rejected) if reason else not found.rejected

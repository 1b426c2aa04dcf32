"""What a run has left in its output_dir: has it come to its end, and is what it saved whole?

Judged from files alone. The report says most; a run without the plugin has the host's files only.
"""

import contextlib
import datetime
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from llamafactory_ascend.checks import adapter, model_files, run_history
from llamafactory_ascend.checks.run_history import History
from llamafactory_ascend.checks.safetensors_header import read_headers
from llamafactory_ascend.features import resuming
from llamafactory_ascend.launching import lock
from llamafactory_ascend.report import document, files
from llamafactory_ascend.run import Finding

TRAINED = "train_results.json"  # the host writes it after it has saved the model
RESULTS = (TRAINED, "eval_results.json", "predict_results.json")
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
SHARDED = ("pytorch_model_fsdp_*", "optimizer_*", "global_step*")  # FSDP's and DeepSpeed's own checkpoints
STALE = 1800.0  # seconds without a sign of life after which a run that nobody can vouch for counts as dead


class Saved(BaseModel):
    """An adapter as a rank has saved it."""

    sha256: str | None = None


class Rank(BaseModel):
    """What is read of a rank's sections."""

    adapter: Saved | None = None


class Launcher(BaseModel):
    """What the launcher has added."""

    exit_code: int | None


class Report(BaseModel):
    """What is read of ascend_report.json."""

    version: int = Field(document.SCHEMA, alias="schema")
    run: str = ""
    state: Literal["completed", "failed", "stopped", "refused", "unfinished"]
    explanation: str
    last_step: int
    max_steps: int | None
    launcher: Launcher | None
    ranks: list[Rank]
    findings: list[Finding]

    def exit_code(self) -> int | None:
        if self.launcher:
            return self.launcher.exit_code
        return 0 if self.state == "completed" else None


class Index(BaseModel):
    """What is read of the list of a sharded model's files."""

    weight_map: dict[str, str]


@dataclass
class RunCheck:
    """The verdict on one output_dir.

    Attributes:
        problems: a sentence for each reason why the run is not done, or what it saved not to be used.
        warnings: what a reader should know and what can be right.
        state: of the report; "" without one.
        exit_code: torchrun's, 0 of a completed run; None where nobody has said it.
        step, max_steps: how far it came, and what it set out for (None: unknown).
        sha256: of adapter_model.safetensors in output_dir, "" where none was judged.
        checkpoint: the folder of the last one, "" where there is none.
    """

    path: str
    state: str = ""
    exit_code: int | None = None
    step: int = 0
    max_steps: int | None = None
    sha256: str = ""
    checkpoint: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"ok": self.ok, **asdict(self)}


def is_run(folder: Path) -> bool:
    """True where a folder holds anything that a run of the host writes."""
    names = (files.NAME, lock.NAME, run_history.STATE, run_history.LOG, *RESULTS)
    return any((folder / name).is_file() for name in names) or bool(run_history.checkpoints(folder))


def is_checkpoint(folder: Path) -> bool:
    """True for a checkpoint, which has no end and no lock of its own."""
    whole = folder.resolve()
    return whole in run_history.checkpoints(whole.parent) and not (whole / files.NAME).exists()


def check(folder: Path, here: lock.Owner, now: float) -> RunCheck:
    """Judge the run that has this output_dir; nothing that is wrong with the files raises.

    Args:
        folder: output_dir.
        here: this process, which knows whether others of this machine live.
        now: seconds since the epoch.
    """
    history = run_history.read(folder)
    report, flaw = _report(folder)
    step, total, state = history.step, history.max_steps, ""
    found = RunCheck(str(folder), warnings=[flaw] if flaw else [])
    if report:
        found.state = state = report.state
        found.exit_code = report.exit_code()
        step, total = max(step, report.last_step), report.max_steps or total
    found.step, found.max_steps = step, total
    finished = state == "completed" or (not state and _is_finished(folder, history))
    if finished:
        _judge_steps(found, history)
    else:
        _judge_end(found, report, folder, here, now)
    if history.flaw:
        found.problems.append(f"{history.flaw}: what the training logged is lost")
    problems, warnings = run_history.judge(history.entries)
    found.problems += problems
    found.warnings += warnings
    _judge_checkpoint(found, folder, finished)
    if finished and (total or (folder / TRAINED).is_file()):
        _judge_product(found, folder, report)
    _judge_lock(found, folder, here, report, finished)
    if report and state == "completed":
        errors = (finding for finding in report.findings if finding.level == "error")
        found.problems += [finding.sentence() for finding in errors]
    return found


def _report(folder: Path) -> tuple[Report | None, str]:
    """Return the report, None where there is none, and why the run is judged without it."""
    path = folder / files.NAME
    try:
        found = Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValidationError) as error:
        return None, f"{run_history.explain(path, error)}: judged by the host's files alone"
    if found.version > document.SCHEMA:
        newer = f"{path} has schema {found.version}, of a newer version than this one, which knows "
        return found, f"{newer}{document.SCHEMA}: what it says may mean something else"
    return found, ""


def _is_finished(folder: Path, history: History) -> bool:
    """True where the host has come to its end, of a training or of an evaluation alone."""
    names = (TRAINED,) if history.max_steps else RESULTS
    return any((folder / name).is_file() for name in names)


def _judge_steps(found: RunCheck, history: History) -> None:
    if found.max_steps and found.step < found.max_steps:
        text = f"{found.step} of {found.max_steps} steps were done"
        if history.stopped_early:
            found.warnings.append(f"{text}: `early_stopping_steps` has ended it")
        else:
            found.problems.append(f"{text}, although the run came to its end")
    if history.others is not None:
        found.warnings.append(
            f"{run_history.LOG} ends at step {history.others}, {run_history.STATE} at {history.step}: "
            "another run has been here"
        )


def _judge_end(found: RunCheck, report: Report | None, folder: Path, here: lock.Owner, now: float) -> None:
    """Say how a run ended that is not done, or that nobody has said it."""
    if report and report.state != "unfinished":
        found.problems.append(f"{report.state}: {report.explanation}")
        return
    where = f"after step {found.step} of {found.max_steps or '?'}"
    owner = lock.read(folder)
    quiet, file = _last_sign(folder, now)
    since = f"{file} was last written {datetime.timedelta(seconds=round(quiet))} ago"
    if owner is not None and lock.is_alive(owner, here):
        found.problems.append(f"still going, {where}: {lock.who(owner)}")
        if quiet > STALE:
            found.warnings.append(f"{since}: a step or an evaluation takes that long, or the run hangs")
        return
    missing = "" if found.state else f" and no {TRAINED}, which the host writes at its end"
    found.problems.append(f"no exit code{missing}: nobody has said how the run ended, {where}")
    if quiet <= STALE and (owner is None or lock.is_alive(owner, here) is None):
        found.warnings.append(f"{since}: it may still be going")
    else:
        found.problems.append(f"{since}: the run was killed")


def _last_sign(folder: Path, now: float) -> tuple[float, str]:
    """Return how many seconds ago a run last wrote, and the file."""
    names = [files.NAME, run_history.LOG, run_history.STATE, lock.NAME]
    names += [path.name for path in run_history.checkpoints(folder)[-1:]]
    times = {}
    for name in names:
        with contextlib.suppress(OSError):  # a run that goes on removes its checkpoints
            times[name] = (folder / name).stat().st_mtime
    last = max(times, key=lambda name: times[name])  # there is one, or there would be no run
    return max(0.0, now - times[last]), last


def _judge_product(found: RunCheck, folder: Path, report: Report | None) -> None:
    """Judge the model in output_dir: an adapter with its values, all weights by their headers."""
    if (folder / adapter.CONFIG).is_file() or (folder / adapter.WEIGHTS).is_file():
        verdict = adapter.check(folder)
        found.problems += verdict.problems
        found.warnings += verdict.warnings
        found.sha256 = verdict.sha256
        first = report.ranks[0].adapter if report and report.ranks else None
        saved = first.sha256 if first else None
        if saved and verdict.sha256 and saved != verdict.sha256:
            found.warnings.append(f"{adapter.WEIGHTS} is not the file that this run saved (sha256 {saved})")
    elif _has_weights(folder):
        found.problems += model_files.problems(folder) or _weights_problems(folder)
    else:
        last = f"; {found.checkpoint} may hold one" if found.checkpoint else ""
        found.problems.append(
            f"the training ended, but there is neither {adapter.WEIGHTS} nor model*.safetensors: "
            f"no model was saved{last}"
        )


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors")) or (folder / INDEX).is_file()


def _weights_problems(folder: Path) -> list[str]:
    """Judge all weights of a model by the headers of their files."""
    path = folder / INDEX
    try:
        tensors = read_headers(folder)
        promised = Index.model_validate_json(path.read_bytes()).weight_map if path.is_file() else {}
    except ValidationError as error:
        return [run_history.explain(path, error)]
    except (OSError, ValueError) as error:
        return [str(error)]
    missing = [name for name in promised if name not in tensors]
    if missing:
        return [f"{len(missing)} of the {len(promised)} tensors in {INDEX} are missing, e.g. {missing[0]}"]
    if not promised and (shard := next(filter(SHARD.fullmatch, _names(folder)), None)):
        return [f"{path} is missing, without which {shard} and its like cannot be loaded"]
    return [] if tensors else [f"model*.safetensors in {folder} hold no tensor"]


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def _judge_checkpoint(found: RunCheck, folder: Path, finished: bool) -> None:
    """Judge the last checkpoint; a run that is not done has nothing else to go on from."""
    last = next(reversed(run_history.checkpoints(folder)), None)
    if last is None:
        return
    found.checkpoint = str(last)
    flaw = resuming.flaw_of_state(last)
    if not flaw and not any(next(last.glob(pattern), None) for pattern in SHARDED):
        cut, missing = resuming.cut_off_files(last), resuming.missing_files(last)
        if cut:
            flaw = f"has {' and '.join(cut)} cut off"
        elif missing:
            flaw = f"has no {' and no '.join(missing)}: a resumed run would start its optimizer afresh"
        elif (last / adapter.CONFIG).is_file():
            flaw = "; ".join(adapter.check(last, trained=False).problems)
        elif _has_weights(last):
            flaw = "; ".join(_weights_problems(last))
    if flaw:
        text = f"{last} {flaw}; {resuming.another(last)}"
        (found.warnings if finished else found.problems).append(text)


def _judge_lock(
    found: RunCheck, folder: Path, here: lock.Owner, report: Report | None, finished: bool
) -> None:
    owner = lock.read(folder)
    if owner is None:
        return
    alive, path = lock.is_alive(owner, here), folder / lock.NAME
    its_own = not finished
    if report and owner.run:  # plain torchrun names none
        its_own = document.has_launcher({"run": report.run}, owner.run)
    if alive is None:
        found.warnings.append(
            f"{path} is held, or was left behind, by {lock.who(owner)}; whether that lives cannot be judged "
            f"from here. If it does not: rm {path}"
        )
    elif not alive:
        found.warnings.append(f"{path} was left behind by {lock.who(owner)}: the next launch takes it over")
    elif not its_own:
        found.warnings.append(f"another run is in {folder}: {lock.who(owner)}")

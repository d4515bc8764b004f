"""Does a training run survive what happens to real ones?  Kills, signals, stopped processes, full disks.

    python -m bench.soak                                10 minutes at tp = dp = 2, on processes of this machine
    python -m bench.soak --minutes 480 --seed 7         another sequence, overnight
    python -m bench.soak --harms 15                     as many harms, however long they take
    python -m bench.soak --memory 5000                  does the memory of a rank grow with its steps?

examples/train_gpt.py trains a small GPT with dropout, first undisturbed, then again and again with harm done to it:

    SIGKILL                          to a rank, to all processes, to the launcher
    SIGTERM, SIGINT, SIGHUP          the same, half of them twice within milliseconds, as Slurm does
    SIGSTOP                          to a rank or to all, SIGCONT seconds later
    disk                             no file of a rank, or of any, can grow beyond 64 KB: a save fails as on a full disk
                                     (RLIMIT_FSIZE of the running process, which needs no root; the error is EFBIG)
    flip                             a bit of a replicated weight is another one on one rank, between two steps

What, to whom and when (while the job starts, between any two steps, within a save), and whether checkpoints are written
in the background, are drawn from --seed.  After each end the job is started with --resume, until it is done.

Clean means: a job ended within a minute and left no process; of a flipped bit the next save named the rank; the next
job found a whole checkpoint, with no more steps
lost than lie between two (in the background: three), none where the job said that it wrote one; and at the end every
weight, the optimizer's state and the log are those of the undisturbed run, bit for bit, with no file beside them.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from bench._parser import parser_of
from tests.examples.launch import EXAMPLES, children, running, started
from tpfuse.tools.ledger.text import Progress, table

SOAKED = Path(__file__).with_name("_soaked.py")
STEPS, EVERY = 40, 5  # of a run; between two checkpoints
UNNAMED = "no save has named the rank whose bit had flipped"
PATIENCE = 60.0  # seconds in which a job has ended
FULL = 1 << 16  # bytes of a file on a full disk
RANK, ALL, LAUNCHER = "a rank", "all", "the launcher"
STOPPING = "SIGTERM", "SIGINT", "SIGHUP"
HARMS = [(action, whom) for action in ("SIGKILL", *STOPPING) for whom in (RANK, ALL, LAUNCHER)]
HARMS += [(action, whom) for action in ("SIGSTOP", "disk") for whom in (RANK, ALL)] + [("flip", RANK)]
MOMENTS = "start", "step", "step", "save"


class Harm(NamedTuple):
    """A harm done to a job, and its moment: after ``part`` of its start, of a step or of a save, ``steps`` steps on."""

    action: str
    whom: str
    rank: int
    twice: bool
    moment: str
    steps: int
    part: float

    def __str__(self) -> str:
        return f"{self.action}{' twice' * self.twice} to {self.whom}"


def harms(rng: random.Random, ranks: int) -> Iterator[Harm]:
    """Draws without end; each kind comes once before any comes again."""
    while True:
        for action, whom in rng.sample(HARMS, len(HARMS)):
            yield Harm(
                action=action,
                whom=whom,
                rank=rng.randrange(ranks),
                twice=rng.random() < 0.5 and action in STOPPING,
                moment="step" if action == "flip" else rng.choice(MOMENTS),
                steps=rng.randint(1, EVERY + 1),
                part=rng.random(),
            )


class Outcome(NamedTuple):
    """A harm, what came of it, and the faults: what was not clean about it."""

    harm: Harm | None  # None: nothing, up to the end
    background: bool
    seconds: float | None  # until the job had ended
    reached: int  # the last step that the job has logged
    promised: bool  # it said that a checkpoint of its last step is written
    lost: int | None
    faults: list[str]


# ---- what a job leaves ----


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of the log that are whole."""
    path, records = folder / "log.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def reached(folder: Path) -> int:
    return max((record["step"] for record in read_log(folder)), default=0)


def inode(folder: Path) -> int:
    """Returns which file the log is: a job that goes on writes it anew."""
    path = folder / "log.jsonl"
    return path.stat().st_ino if path.exists() else 0


def reached_since(folder: Path, before: int) -> int:
    """Returns the last step in the log; 0 where it is still that of ``before``, an earlier job's."""
    return reached(folder) if inode(folder) != before else 0


def latest(folder: Path) -> Path | None:
    """Returns the folder of the newest checkpoint."""
    file = folder / "checkpoints" / "latest"
    return file.parent / file.read_text().strip() if file.exists() else None


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the bytes of everything in the files of a folder."""
    return {
        f"{file.name}: {name}": value.contiguous().reshape(-1).view(torch.uint8)
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def differences(folder: Path, reference: Path) -> list[str]:
    """Says how a finished run differs from another: log, weights, optimizer, files; [] where it does not."""
    ours, expected = latest(folder), latest(reference)
    if ours is None or expected is None:
        return ["there is no checkpoint"]
    faults = [*_log_differences(read_log(folder), read_log(reference)), *_file_faults(folder, reference)]
    for ours_in, expected_in in (ours, expected), (folder / "hf", reference / "hf"):
        a, b = tensors(ours_in), tensors(expected_in)
        same = lambda name, a=a, b=b: name in a and name in b and torch.equal(a[name], b[name])
        faults += [f"{ours_in.name}/{name} differs" for name in sorted(a.keys() | b.keys()) if not same(name)]
    metas = [json.loads((folder / "meta.json").read_text()) for folder in (ours, expected)]
    unlike = {"name", "files", "sha256"}  # the folder's name, and sums over files that hold it
    keys = sorted((metas[0].keys() | metas[1].keys()) - unlike)
    return faults + [f"{key} of meta.json differs" for key in keys if metas[0].get(key) != metas[1].get(key)]


def _log_differences(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> Iterator[str]:
    values = "step", "loss", "lr", "grad_norm", "held_out_bits"  # not the speeds
    key = lambda record: (record["step"], "loss" in record)
    lines = [[(key(r), tuple(r.get(v) for v in values)) for r in records] for records in (ours, expected)]
    for step, loss in sorted({line[0] for line in lines[0] + lines[1]}):
        mine, expected_values = ([values for key, values in side if key == (step, loss)] for side in lines)
        if mine != expected_values:
            yield f"the log's {'loss' if loss else 'validation'} of step {step}: {mine} instead of {expected_values}"
    if lines[0] != lines[1] and sorted(lines[0], key=repr) == sorted(lines[1], key=repr):
        yield "the log's lines are in another order"


def _file_faults(folder: Path, reference: Path) -> list[str]:
    """Names files that the run should not have left, or should have."""

    def files(root: Path) -> list[str]:
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
        names = [re.sub(r"step-\d+(-\d+)?/", "step/", name) for name in names]  # a signal writes one at any step
        return sorted(names)

    ours, expected = files(folder), files(reference)
    left = [f"{name} is left over" for name in set(ours) if ours.count(name) > expected.count(name)]
    return sorted(left + [f"{name} is missing" for name in set(expected) if ours.count(name) < expected.count(name)])


# ---- processes ----


def session(leader: int) -> list[int]:
    """Returns the processes of a session that are alive."""
    matching = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                matching.append(int(path.name))
    return matching


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until ``condition()`` holds -> whether it came to hold in that time."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return held


class Job:
    """One start of the example under torchrun, in a session of its own."""

    def __init__(self, soak: "Soak", folder: Path, transcript: Path, background: bool):
        self.soak, self.folder, self.transcript, self.background = soak, folder, transcript, background
        self.first = latest(folder)
        self.log = inode(folder)
        flags = f"--size soak --max-mb 0.03 --batch 4 --seq 32 --steps {STEPS} --checkpoint-every {EVERY} --resume"
        flags += f" --family gpt2 --dropout 0.1 --validate-every 20 --tp {soak.tp} --dp {soak.dp} --timeout 120 --out"
        target = ["background" if background else "foreground", str(EXAMPLES / "train_gpt.py"), *flags.split()]
        self.began = time.monotonic()
        self.context = started([str(SOAKED), *target, str(folder)], soak.ranks, transcript, transcript)

    def __enter__(self) -> "Job":
        self.process = self.context.__enter__()
        self.pid = self.process.pid
        wait(lambda: not self.process.is_alive() or len(self.workers()) == self.soak.ranks, PATIENCE)
        return self

    def __exit__(self, *error: Any) -> None:
        send(signal.SIGKILL, session(self.pid))
        self.context.__exit__(*error)

    def workers(self) -> list[int]:
        with contextlib.suppress(OSError):
            return children(self.pid)
        return []

    def text(self) -> str:
        return self.transcript.read_text() if self.transcript.exists() else ""

    def resumed(self) -> int | None:
        """Returns the step that it went on at; None where it has not come to that."""
        resumed = re.search(r"resumed at step (\d+)|no checkpoint in", self.text())
        return resumed and int(resumed[1] or 0)

    def await_moment(self, harm: Harm, say: Callable[[], None]) -> bool:
        """Waits for the moment of a harm -> whether the job is still there."""
        alive = self.process.is_alive

        def steps_taken() -> bool:
            say()
            base = self.resumed()
            return not alive() or (
                base is not None and inode(self.folder) != self.log and reached(self.folder) >= base + harm.steps
            )

        saving = lambda: not alive() or any((self.folder / "checkpoints").glob("step-*/saving.json"))
        if harm.moment == "start":
            wait(lambda: not alive(), harm.part * self.soak.start_seconds)
        else:
            wait(steps_taken, 10 * PATIENCE)
            if harm.moment == "save":
                wait(saving, PATIENCE)
            wait(lambda: not alive(), harm.part * (0.03 if harm.moment == "save" else self.soak.step_seconds))
        return alive()

    def do(self, harm: Harm) -> None:
        everyone, workers = session(self.pid), self.workers()
        targets = {RANK: workers[harm.rank : harm.rank + 1], LAUNCHER: [self.pid]}.get(harm.whom, everyone)
        if harm.action == "disk":
            for pid in targets if harm.whom == RANK else workers:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
            return
        send(signal.SIGUSR2 if harm.action == "flip" else signal.Signals[harm.action], targets)
        if harm.twice:
            time.sleep(0.002)
            send(signal.Signals[harm.action], targets)
        if harm.action == "SIGSTOP":
            time.sleep(0.5 + 2 * harm.part)
            send(signal.SIGCONT, targets)

    def ended(self, seconds: float) -> list[str]:
        """Waits for the end of all its processes -> what is not clean about it."""
        gone = lambda: not self.process.is_alive() and not any(map(running, session(self.pid)))
        if wait(gone, seconds):
            return []
        left = session(self.pid)
        return [f"{len(left)} processes are left after {seconds:g} s"]


# ---- the soak ----


class Soak:
    """All runs of one command."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.tp, self.dp, self.seed, self.folder = args.tp, args.dp, args.seed, folder
        self.ranks = args.tp * args.dp
        self.reference = folder / "undisturbed" / "run"
        self.start_seconds = self.step_seconds = 0.0
        self.outcomes: list[Outcome] = []
        self.progress = Progress(long=True)
        self.drawn = harms(random.Random(self.seed), self.ranks)
        self.until, self.count = time.monotonic() + 60 * args.minutes, args.harms

    def undisturbed(self) -> None:
        """Makes the run that the others are compared with, and measures how long starts and steps take."""
        self.reference.parent.mkdir(parents=True)
        with Job(self, self.reference, self.reference.parent / "said.txt", False) as job:
            wait(lambda: not job.process.is_alive() or reached(self.reference) > 0, 600)
            began = time.monotonic()
            self.start_seconds = began - job.began
            self.progress.update("the undisturbed run")
            job.process.join(600)
            self.step_seconds = (time.monotonic() - began) / STEPS
            if job.process.exitcode != 0:
                raise RuntimeError(f"bench.soak: the undisturbed run has failed:\n{job.text()}")

    def episode(self, number: int) -> list[str]:
        """One run from its first step to its last -> how it differs from the undisturbed one."""
        rng = random.Random(f"{self.seed}/{number}")
        folder = self.folder / f"{number:04d}"
        run, jobs, finished = folder / "run", 0, False
        folder.mkdir()
        open_ends: list[int] = []  # of self.outcomes, whose lost steps the next start will tell
        while not finished:
            jobs += 1
            with Job(self, run, folder / f"said-{jobs:03d}.txt", rng.random() < 0.5) as job:
                outcomes, finished = self.harm_until_ended(job, self.drawn)
            self._count_lost(open_ends, job)
            open_ends += range(len(self.outcomes), len(self.outcomes) + len(outcomes))
            self.outcomes += outcomes
        return differences(run, self.reference)

    def harm_until_ended(self, job: Job, drawn: Iterator[Harm]) -> tuple[list[Outcome], bool]:
        """Does one thing after the other to a job, up to one that ends it -> what was done, and whether it finished."""
        outcomes, harm, seconds = [], None, None
        episode = job.folder.parent.name
        say = lambda: self.progress.update(f"{len(self.outcomes)} harms; {episode}: step {reached(job.folder)}")
        faults: list[str] = []
        for drawn_harm in drawn:
            if not job.await_moment(drawn_harm, say):
                break
            harm, since = drawn_harm, time.monotonic()
            job.do(harm)
            if harm.action == "SIGSTOP":
                outcomes.append(self._outcome(job, harm, None, []))
                harm = None
                continue
            faults = job.ended(PATIENCE)
            seconds = time.monotonic() - since
            faults += [] if harm.action != "flip" or f"rank {harm.rank} differs from" in job.text() else [UNNAMED]
            break
        if harm is None:
            faults = job.ended(PATIENCE)
        code, folder = job.process.exitcode, latest(job.folder)
        complete = folder is not None and f"{STEPS:08d}" in folder.name
        if harm is None and code != 0:
            faults = [*faults, f"it ended with code {code}, and nothing that ends a job was done to it"]
        if harm is not None or faults:
            outcomes.append(self._outcome(job, harm, seconds, faults))
        return outcomes, code == 0 and complete

    def _outcome(self, job: Job, harm: Harm | None, seconds: float | None, faults: list[str]) -> Outcome:
        promised = "checkpoint written" in job.text()
        state = dict(reached=reached_since(job.folder, job.log), promised=promised, faults=faults)
        return Outcome(harm=harm, background=job.background, seconds=seconds, lost=None, **state)

    def _count_lost(self, open_ends: list[int], job: Job) -> None:
        """Fills in how many steps each of what was done cost, once a job has said where it went on."""
        step = job.resumed()
        if step is None:
            return
        for i in open_ends:
            self.outcomes[i] = with_lost(self.outcomes[i], step)
        open_ends.clear()

    def goes_on(self) -> bool:
        """Returns whether to start another run."""
        return time.monotonic() < self.until if self.count is None else len(self.outcomes) < self.count

    def run(self) -> list[str]:
        """Returns what was not clean."""
        faults, number = [], 0
        self.undisturbed()
        while number == 0 or self.goes_on():
            count = len(self.outcomes)
            faults += [f"run {number}: {fault}" for fault in self.episode(number)]
            faults += [f"run {number}: {d.harm}: {fault}" for d in self.outcomes[count:] for fault in d.faults]
            number += 1
        self.progress.clear()
        return faults


def with_lost(outcome: Outcome, resumed: int) -> Outcome:
    """Returns what was done with the steps that it cost, and a fault where these are too many."""
    lost = max(0, outcome.reached - resumed)
    allowed = 0 if outcome.promised else EVERY * (2 if outcome.background else 1)
    detail = " though a checkpoint was said to be written" * outcome.promised
    fault = [f"{lost} steps are lost{detail}, at most {allowed} may be"] if lost > allowed else []
    return outcome._replace(lost=lost, faults=outcome.faults + fault)


def summary(outcomes: list[Outcome]) -> str:
    """Returns the table: a line for each kind of harm."""
    rows = []
    for action, whom in HARMS:
        matching = [d for d in outcomes if d.harm is not None and (d.harm.action, d.harm.whom) == (action, whom)]
        if matching:
            seconds = [d.seconds for d in matching if d.seconds is not None]
            until = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "goes on"
            lost = [d.lost or 0 for d in matching if action != "SIGSTOP"]
            twice, bad = sum(d.harm.twice for d in matching), sum(bool(d.faults) for d in matching)
            verdict = "yes" if not bad else f"no: {bad}"
            rows.append([f"{action} to {whom}", len(matching), twice or None, until, max(lost, default=None), verdict])
    header = "what", "times", "twice", "seconds until ended", "most steps lost", "clean"
    return table(header, rows)


def parse() -> argparse.Namespace:
    parser = parser_of("bench.soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10, help="start new runs for so long (default 10)")
    add("--harms", type=int, metavar="N", help="start new runs until so many harms were done, instead")
    add("--tp", type=int, default=2, help="tensor-parallel ranks (default 2)")
    add("--dp", type=int, default=2, help="data-parallel replicas (default 2)")
    add("--seed", type=int, default=0, help="what is done, and when (default 0)")
    add("--out", type=Path, metavar="DIR", help="a new folder for runs and what they said (default: removed if clean)")
    add("--json", action="store_true", help="print everything that was done as JSON instead of the table")
    add("--memory", type=int, metavar="STEPS", help="measure the memory of ranks over so many steps instead, say 5000")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.memory is not None:
        from bench import _memory

        return _memory.main(args.memory, args.json)
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # as Ctrl-C does, through what ends the jobs
    with contextlib.ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(args, folder.resolve())
        faults = soak.run()
        if faults and not args.out:
            stack.pop_all()  # the folder stays
    if args.json:
        print(json.dumps(dict(seed=args.seed, done=[d._asdict() for d in soak.outcomes], faults=faults), default=str))
    else:
        print(summary(soak.outcomes))
    for fault in faults:
        print(f"not clean: {fault}", file=sys.stderr)
    if faults:
        print(f"what was said and written is in {folder}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

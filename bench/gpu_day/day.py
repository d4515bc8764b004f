"""The day itself: stages of parts until the time is over, then what leaves the machine."""

import datetime
import hashlib
import os
import pathlib
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field

from bench.gpu_day import cache
from bench.gpu_day.children import ROOT, Lane, Setting
from bench.gpu_day.part import Context, Part
from bench.gpu_day.plan import SETUP, stages
from bench.gpu_day.results import DONE, FAILED, NAME, NOT_REACHED, Broken, Results, load
from bench.gpu_day.tools import stand_ins

PACKING = 30.0  # seconds kept for packing what was compiled
LEAST = 5.0  # seconds under which no part is begun
LOG = 900_000  # bytes of log.txt
TAIL = 30_000  # of one process in it


def say(line: str) -> None:
    print(line, flush=True)


def sources() -> str:
    """A fingerprint of what is measured."""
    files = [path for path in sorted((ROOT / "tpfuse").rglob("*")) if path.suffix in (".py", ".json")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _stop(*_: object) -> None:
    raise SystemExit(143)


@dataclass
class Day:
    """One call: ``seconds`` of the clock on the wall, into ``out``."""

    folder: pathlib.Path
    seconds: float
    rehearse: bool
    resume: pathlib.Path | None = None
    plan: list[list[Part]] | None = None  # default: the whole day
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.until = self.began + self.seconds
        self.packing = min(PACKING, self.seconds / 6)
        self.plan = stages(self.rehearse) if self.plan is None else self.plan
        if self.resume != self.folder and (self.folder / NAME).exists():
            raise Broken(
                f"{self.folder / NAME} is there: --resume {self.folder} goes on with it; or choose another --out"
            )
        self.results = Results(self.folder / NAME, self.rehearse)
        if self.resume is not None:
            data = load(self.resume)
            if data["rehearsed"] != self.rehearse:
                kind = "a rehearsal" if data["rehearsed"] else "no rehearsal"
                raise Broken(f"{self.resume / NAME} is of {kind}, and the two are never mixed")
            self.results.data = data
        self.lanes: list[Lane] = []

    # ---- from beginning to end ----

    def run(self) -> int:
        """Returns the exit status; results are in the file whatever happens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu-day-"))
        self.cache = self.scratch / "cache" if self.rehearse else cache.ROOT
        guard = threading.Timer(self.seconds, self._cut)
        guard.daemon = True
        guard.start()
        handler = signal.signal(signal.SIGTERM, _stop)
        reached: list[str] = []
        try:
            self._begin()
            for stage in self.plan or []:
                count = len(self.lanes)
                reached += self._stage(stage)
                if stage[0].name == SETUP and not self._ready():
                    break
                if stage[0].stage == "warm" and len(self.lanes) > count:
                    self._pack(time.time() + self.packing / 2)
        finally:
            for lane in self.lanes:
                lane.stop()
            self._finish()
            guard.cancel()
            signal.signal(signal.SIGTERM, handler)
        return self._report(reached)

    def _cut(self) -> None:
        """The last resort, when even the end takes too long."""
        for lane in self.lanes:
            if lane.child is not None:
                lane.child.kill()
        say("the time is over")
        os._exit(1)

    def _begin(self) -> None:
        digest = sources()
        earlier = {call["sources"] for call in self.results.data["calls"]}
        if earlier - {digest}:
            self.results.note(
                f"the library's sources changed between the calls: {', '.join(sorted(earlier))}, {digest}"
            )
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.results.data["calls"].append(dict(began=started, sources=digest, seconds=self.seconds))
        self.cache.mkdir(parents=True, exist_ok=True)
        if self.rehearse:
            stand_ins(self.scratch / "bin")
        for line in cache.unpack(self.resume, self.cache) if self.resume is not None else []:
            self.results.note(line)
            say(line)
        self.results.data["parts"].pop(SETUP, None)
        for stage in self.plan or []:
            for part in stage:
                self.results.part(part.name)
        self.results.save()

    def _ready(self) -> bool:
        """Returns whether the setup is done; drops results of another card."""
        jobs = self.results.part(SETUP)["jobs"].values()
        if any(job["status"] != DONE for job in jobs):
            say("the setup did not come through, and nothing runs without it")
            return False
        names = [row["device"] for row in self.results.rows()[SETUP] if "device" in row]
        card = self.results.data.get("device", names[0])
        if card != names[0]:
            self.results.note(f"{card}'s results were dropped: this is {names[0]}")
            for name, _ in self.results.parts():
                if name != SETUP:
                    del self.results.data["parts"][name]
                    self.results.part(name)
        self.results.data["device"] = names[0]
        return True

    # ---- a stage ----

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = dict(PYTHONPATH=path, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", KINETO_LOG_LEVEL="99")
        variables |= dict(TRITON_CACHE_DIR=str(self.cache / "triton"), TORCHINDUCTOR_COMPILE_THREADS="4")
        variables |= dict(TORCHINDUCTOR_CACHE_DIR=str(self.cache / "inductor"))
        if self.rehearse:
            variables |= dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
            variables["PATH"] = f"{self.scratch / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return dict(os.environ) | variables

    def _stage(self, stage: list[Part]) -> list[str]:
        """Runs parts side by side; returns the names of those that were reached."""
        end = self.until - self.packing
        setting = Setting(self.rehearse, self.scratch, self._environment())
        open_parts: dict[str, tuple[Part, float, list[Lane]]] = {}
        for part in stage:
            began = time.time()
            if end - began < min(LEAST, part.seconds):
                continue
            jobs = self._jobs(part)
            shares = [jobs[i :: part.parallel] for i in range(min(part.parallel, len(jobs)))]
            until = min(end, began + part.seconds)
            if jobs:
                say(f"{self._clock()} {part.name}: {len(jobs)} jobs, up to {until - began:.0f} s")
            lanes = [Lane(part, share, setting=setting, results=self.results, until=until) for share in shares]
            self.lanes += lanes
            open_parts[part.name] = part, began, lanes
        reached = list(open_parts)
        while open_parts:
            for name, (part, began, lanes) in list(open_parts.items()):
                if not any([lane.step() for lane in lanes]):
                    self._close(part, began)
                    del open_parts[name]
            time.sleep(0.05)
        return reached

    def _jobs(self, part: Part) -> list[str]:
        """Those that are not done; a part whose list cannot be made has one job, which failed."""
        try:
            return self.results.plan(
                part.name, part.jobs(Context(self.rehearse, self.scratch, self.results.rows(), say))
            )
        except Exception as error:
            self.results.plan(part.name, ["list"])
            self.results.end(part.name, "list", FAILED, seconds=0.0, error=f"{type(error).__name__}: {error}")
            return []

    def _close(self, part: Part, began: float) -> None:
        now = time.time()
        state = self.results.part(part.name)
        state["seconds"] = round(state["seconds"] + now - began, 2)
        self.results.save()
        status = state["status"]
        say(f"{self._clock()} {part.name}: {status} in {now - began:.0f} s. {self._headline(part)}")

    def _clock(self) -> str:
        now = time.time()
        return f"[{now - self.began:4.0f} s, {max(self.until - now, 0):4.0f} s left]"

    def _headline(self, part: Part) -> str:
        try:
            return part.headline(self.results.rows()[part.name])
        except Exception as error:  # rows that another version wrote
            return f"no headline ({type(error).__name__}: {error})"

    # ---- what leaves ----

    def _pack(self, until: float) -> None:
        for line in cache.pack(self.cache, self.folder, until):
            self.results.note(line)

    def _finish(self) -> None:
        self.results.save()
        self._log()
        self._pack(self.until - 2)
        self.results.data["calls"][-1]["took"] = round(time.time() - self.began, 1)
        self.results.save()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _log(self) -> None:
        logs = [path.read_bytes()[-TAIL:] for path in sorted(self.scratch.glob("*.log"))]
        (self.folder / "log.txt").write_bytes(b"\n".join(logs)[-LOG:])

    def _report(self, reached: list[str]) -> int:
        lines = [("part", "status", "seconds", "")]
        for part in [part for stage in self.plan or [] for part in stage]:
            state = self.results.part(part.name)
            lines.append(
                (part.name, state["status"], f"{state['seconds']:.0f}", self._headline(part) or state["error"])
            )
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        for line in lines:
            cells = line[0].ljust(widths[0]), line[1].ljust(widths[1]), line[2].rjust(widths[2]), line[3][:160]
            say("  ".join(cells).rstrip())
        wrong = [name for name in reached if self.results.part(name)["status"] != DONE]
        for name in wrong:
            say(f"{name}: {self.results.part(name)['error']}")
        left = [name for name, part in self.results.parts() if part["status"] == NOT_REACHED]
        if left:
            say(f"not reached: {', '.join(left)}")
        say(f"{self.results.path}: {'not done: ' + ', '.join(wrong) if wrong else 'every part reached is done'}")
        return 1 if wrong else 0
